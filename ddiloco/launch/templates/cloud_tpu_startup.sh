#!/bin/bash
# Runs at every start of each machine of a learner, as root; again and again until all of it is done, since
# metadata, a secret or the set-up may be out of reach for a moment.
if [ -z "${DDILOCO_ONCE:-}" ]; then
  until DDILOCO_ONCE=1 bash "$0"; do sleep 10; done
  exit
fi
set -euo pipefail
read_metadata() {
  curl -sf -H Metadata-Flavor:Google "http://metadata.google.internal/computeMetadata/v1/instance/$1"
}
learner=$(read_metadata attributes/ddiloco-learner)
restarts=$(read_metadata attributes/ddiloco-restarts || echo 0)
{% if fleet.processes > 1 %}
process=$(read_metadata attributes/agent-worker-number)
{# Workers of a slice know each other's addresses, in the order of their numbers. #}
first=$(read_metadata attributes/worker-network-endpoints | cut -d, -f1 | sed 's/.*://')
{% endif %}
mkdir -p /var/lib/ddiloco
{{ tpu.setup }}
umask 077
gcloud secrets versions access latest --secret={{ fleet.name }}-learner-"$learner" > /var/lib/ddiloco/token
cat > /var/lib/ddiloco/environment <<END
{{ PREFIX }}LEARNER=$learner
{{ PREFIX }}RESTARTS=$restarts
{{ PREFIX }}SYNCER={{ tpu.syncer }}
{{ PREFIX }}TOKEN_FILE=/var/lib/ddiloco/token
{{ PREFIX }}WORKDIR=/var/lib/ddiloco/run
{{ PREFIX }}GRACE={{ fleet.grace | round(method="floor") | int }}
{% if fleet.processes > 1 %}
{{ PREFIX }}PROCESS=$process
{{ PREFIX }}PROCESSES={{ fleet.processes }}
{{ PREFIX }}COORDINATOR=$first:{{ fleet.coordinator_port }}
{% endif %}
JAX_COMPILATION_CACHE_DIR=/var/lib/ddiloco/jax
TFDS_DATA_DIR=/var/lib/ddiloco/data
END
cat > /etc/systemd/system/ddiloco.service <<END
[Service]
EnvironmentFile=/var/lib/ddiloco/environment
EnvironmentFile=-/run/ddiloco.restarts
WorkingDirectory=/opt/ddiloco
ExecStart=/opt/ddiloco/.venv/bin/python -m experiments.learner {{ fleet.settings | words }}
ExecStopPost=/bin/sh -c "echo {{ PREFIX }}RESTARTS=1 > /run/ddiloco.restarts"
Restart=on-failure
RestartSec=2
RestartPreventExitStatus={{ REFUSED }}
TimeoutStopSec={{ fleet.grace | round(method="ceil") | int + 5 }}
END
systemctl daemon-reload
systemctl restart ddiloco
