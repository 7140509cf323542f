#!/bin/bash
set -euo pipefail
cd "$(dirname "$0")"
rm -f {{ workdir }}.launch/address  # of a run before, whose node may have nothing to say
syncer=$(sbatch --parsable syncer.sbatch)
learners=$(sbatch --parsable learners.sbatch)
{% if fleet.shards > 1 %}
shards=$(sbatch --parsable shards.sbatch)
{% endif %}
echo "syncer $syncer, learners $learners{{ ", shards $shards" if fleet.shards > 1 }}; to end the run: scancel $syncer $learners{{ " $shards" if fleet.shards > 1 }}"
