"""The outer learning rate by the number of learners, at an equal global batch: who is best at what cost.

  python -m experiments.sweep --sweep=configs/sweeps/learners_and_rates.py --output=runs/rates --jobs=2

or, in place of --jobs, with --launcher=ray or --launcher=slurm.

18 runs of the micro model (configs/micro.py), each scored ten times: runs/rates/sweep.html has held-out loss
against tokens, bytes and time.
"""

from configs import micro

LEARNERS = {"sync.num_learners": (2, 8), "train.batch_size": (8, 2), "data.interleave": (64, 16)}
RATES = {"outer.learning_rate": (0.5, 0.7, 1.0)}


def get_sweep() -> list[dict]:
    """Each rate with each number of learners."""
    return micro.grid(RATES, LEARNERS, {"eval.every": (24,)})
