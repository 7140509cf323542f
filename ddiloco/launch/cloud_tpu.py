"""A run on Cloud TPU: a queued resource for each learner, and a machine of its own for the syncer.

A queued resource that was preempted does not come back by itself: `keep.sh`, which a cron job or a person
runs again and again, deletes what is suspended or has failed, and asks for it anew. On each of its machines a
startup script makes the learner a systemd service, restarted as its exit code says; at a notice of preemption
the machine shuts down, systemd ends the service with SIGTERM, and the learner leaves.
"""

from __future__ import annotations

import dataclasses
import math
import shlex

from ddiloco.launch.assignment import PREFIX, REFUSED
from ddiloco.launch.plan import Fleet, Plan

_STARTUP = """\
#!/bin/bash
# Runs at every start of each machine of a learner, as root.
set -euo pipefail
read_metadata() {{
  curl -sf -H Metadata-Flavor:Google "http://metadata.google.internal/computeMetadata/v1/instance/$1"
}}
learner=$(read_metadata attributes/ddiloco-learner)
process=$(read_metadata attributes/agent-worker-number || echo 0)
{coordinator}mkdir -p /var/lib/ddiloco
{setup}
umask 077
gcloud secrets versions access latest --secret={name}-learner-"$learner" > /var/lib/ddiloco/token
cat > /var/lib/ddiloco/environment <<END
{prefix}LEARNER=$learner
{prefix}SYNCER={syncer}
{prefix}TOKEN_FILE=/var/lib/ddiloco/token
{prefix}WORKDIR=/var/lib/ddiloco/run
{prefix}GRACE={grace}
{several}JAX_COMPILATION_CACHE_DIR=/var/lib/ddiloco/jax
TFDS_DATA_DIR=/var/lib/ddiloco/data
END
cat > /etc/systemd/system/ddiloco.service <<END
[Service]
EnvironmentFile=/var/lib/ddiloco/environment
WorkingDirectory={folder}
ExecStart={command} --config.remote.donor_host=$(hostname -I | cut -d" " -f1)
Restart=on-failure
RestartSec=2
RestartPreventExitStatus={refused}
TimeoutStopSec={stop}
END
systemctl daemon-reload
systemctl restart ddiloco
"""

_KEEP = """\
#!/bin/bash
# Asks for what is not there: at first for all, later for what was preempted.
set -uo pipefail
cd "$(dirname "$0")"
for learner in $(seq 0 {last}); do
  name={name}-learner-$learner
  state=$(gcloud compute tpus queued-resources describe "$name" {where} \\
    --format='value(state.state)' 2>/dev/null)
  case "$state" in
    SUSPENDED|FAILED)
      gcloud compute tpus queued-resources delete "$name" {where} --quiet --force ;;
    ?*) continue ;;
  esac
  gcloud compute tpus queued-resources create "$name" --node-id="$name" {where} {what} \\
    --metadata=ddiloco-learner="$learner" --metadata-from-file=startup-script=startup.sh
done
"""


@dataclasses.dataclass(frozen=True)
class CloudTpu:
    """What is asked for.

    Attributes:
      zone, accelerator, runtime: such as us-east5-a, v5p-16 and v2-alpha-tpuv5.
      syncer: HOST:PORT of the syncer, which runs elsewhere.
      folder: of the code on the machines.
      setup: a shell command that puts the code there, with its environment in .venv.
      project: empty: gcloud's own.
      spot: whether it may be preempted.
    """

    zone: str
    accelerator: str
    runtime: str
    syncer: str
    folder: str = "/opt/ddiloco"
    setup: str = ":"
    project: str = ""
    spot: bool = False


def plan(fleet: Fleet, tpu: CloudTpu) -> Plan:
    """The startup script, the script that asks for the resources, and the command that runs it first."""
    where = [f"--zone={tpu.zone}", *([f"--project={tpu.project}"] if tpu.project else [])]
    what = [f"--accelerator-type={tpu.accelerator}", f"--runtime-version={tpu.runtime}"]
    what += ["--spot"] if tpu.spot else []
    several, coordinator = "", ""
    if fleet.processes > 1:
        # Workers of a slice know each other's addresses, in the order of their numbers.
        coordinator = (
            "first=$(read_metadata attributes/worker-network-endpoints | cut -d, -f1 | sed 's/.*://')\n"
        )
        several = (
            f"{PREFIX}PROCESS=$process\n{PREFIX}PROCESSES={fleet.processes}\n"
            f"{PREFIX}COORDINATOR=$first:{fleet.coordinator_port}\n"
        )
    startup = _STARTUP.format(
        coordinator=coordinator,
        setup=tpu.setup,
        name=fleet.name,
        prefix=PREFIX,
        syncer=tpu.syncer,
        grace=math.floor(fleet.grace),
        several=several,
        folder=tpu.folder,
        command=f"{tpu.folder}/.venv/bin/python -m experiments.learner {shlex.join(fleet.config)}",
        refused=REFUSED,
        stop=math.ceil(fleet.grace) + 5,
    )
    keep = _KEEP.format(
        last=fleet.learners - 1, name=fleet.name, where=shlex.join(where), what=shlex.join(what)
    )
    return Plan({"startup.sh": startup, "keep.sh": keep}, [["./keep.sh"]])
