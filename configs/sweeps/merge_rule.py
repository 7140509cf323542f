"""Direct averaging against RDA, by the number of learners, at an equal global batch of 32 rows.

  python -m experiments.sweep --sweep=configs/sweeps/merge_rule.py --output=runs/merge_rule --jobs=2

24 runs of the micro model (configs/micro.py). Paper, text average over benchmarks: RDA 55.4 against 54.1 at
M=8, 54.5 against 52.7 at M=16. A plain mean of nearly orthogonal outer gradients shrinks with the root of M.
"""

from configs import micro

LEARNERS = {"sync.num_learners": (2, 4, 8, 16), "train.batch_size": (16, 8, 4, 2)}


def get_sweep() -> list[dict]:
    """Both rules with each number of learners."""
    return micro.grid({"outer.merge": ("direct", "rda")}, LEARNERS)
