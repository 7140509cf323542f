"""The quorum K, with and without a grace window, among eight learners that differ in speed.

  python -m experiments.sweep --sweep=configs/sweeps/quorum.py --output=runs/quorum --jobs=2

24 runs of the micro model (configs/micro.py), at equal tokens: `wall_seconds` says how long they took in
virtual time, `mean_quorum` how many learners a merge had.
"""

from configs import micro

EIGHT = {"sync.num_learners": (8,), "train.batch_size": (2,), "train.tokens": (240 * 16 * 128,)}


def get_sweep() -> list[dict]:
    """Each quorum with gamma 0 and 0.8."""
    quorums = {"sync.quorum": (1, 2, 4, 8)}, {"sync.gamma": (0.0, 0.8)}
    uneven = {name: (value,) for name, value in micro.UNEVEN.items()}
    return micro.grid(*quorums, EIGHT, uneven)
