#!/bin/bash
# Asks for what is not there: at first for all, later for what was preempted.
set -uo pipefail
cd "$(dirname "$0")"
for learner in $(seq 0 {{ fleet.learners - 1 }}); do
  name={{ fleet.name }}-learner-$learner
  state=$(gcloud compute tpus queued-resources describe "$name" {{ where | words }} \
    --format='value(state.state)' 2>/dev/null)
  restarts=0
  case "$state" in
    SUSPENDED|FAILED)
{# Of one that ran before, a refusal on a new machine is the data's or the network's. #}
      [ "$state" = FAILED ] || restarts=1
      gcloud compute tpus queued-resources delete "$name" {{ where | words }} --quiet --force ;;
    ?*) continue ;;
  esac
  gcloud compute tpus queued-resources create "$name" --node-id="$name" {{ where | words }} {{ what | words }} \
    --metadata=ddiloco-learner="$learner",ddiloco-restarts="$restarts" --metadata-from-file=startup-script=startup.sh
done
