#!/bin/bash
set -euo pipefail
cd "$(dirname "$0")"
rm -f {{ workdir }}.launch/address  # of a run before, whose node may have nothing to say
syncer=$(sbatch --parsable syncer.sbatch)
learners=$(sbatch --parsable learners.sbatch)
{% if fleet.parts %}
parts=$(sbatch --parsable parts.sbatch)
{% endif %}
echo "syncer $syncer, learners $learners{{ ", parts $parts" if fleet.parts }}; to end the run: scancel $syncer $learners{{ " $parts" if fleet.parts }}"
