#!/bin/bash
# Launches the syncer's cluster, then the learners' jobs.
set -euo pipefail
cd "$(dirname "$0")"
{% set cluster = fleet.name ~ "-syncer" %}
sky launch -y -d -c {{ cluster }} syncer.yaml
address=$(sky status --endpoint {{ fleet.port }} {{ cluster }} | tail -n 1)
address=${address#*://}
if [ ! -e credentials/tokens ]; then
  (cd {{ sky.folder | shell }} && python -m experiments.make_tokens --learners={{ fleet.learners }} --output="$OLDPWD/credentials/tokens")
fi
if [ ! -e credentials/tls ]; then
  {{ sky.folder | shell }}/scripts/make_certs.sh credentials/tls --learners={{ fleet.learners }} "${address%:*}"
fi
rsync -a credentials/tokens/tokens credentials/tls/syncer {{ cluster }}:{{ CREDENTIALS }}/
ssh {{ cluster }} touch {{ CREDENTIALS }}/ready
{% for learner in range(fleet.learners) %}
sky jobs launch -y -d --name {{ fleet.name }}-learner-{{ learner }} --env {{ PREFIX }}SYNCER="$address" learner-{{ learner }}.yaml
{% endfor %}
echo "the syncer is at $address; experiments.control stop ends the run, then: sky down -y {{ cluster }}"
