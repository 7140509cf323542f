#!/bin/bash
set -euo pipefail
syncer=$(sbatch --parsable syncer.sbatch)
learners=$(sbatch --parsable learners.sbatch)
echo "syncer $syncer, learners $learners; to end the run: scancel $syncer $learners"
