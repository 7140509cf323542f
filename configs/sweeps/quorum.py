"""The quorum K, with and without a grace window, among eight learners that differ in speed.

  python -m experiments.sweep --sweep=configs/sweeps/quorum.py --output=runs/quorum --jobs=2

24 runs of the micro model (configs/micro.py), all of 270 global steps: `wall_seconds` says how long they
took in virtual time, `mean_quorum` how many learners a merge had. With K=1 the clock is the fastest
learner's. No learner waits for another. Paper, text average, its K=8 waiting: 55.3 for K=1 with grace, 54.4
for K=8, 51.4 for K=1 without.
"""

from configs import micro


def get_sweep() -> list[dict]:
    """Each quorum with gamma 0 and 0.8."""
    quorums = {"sync.quorum": (1, 2, 4, 8)}, {"sync.gamma": (0.0, 0.8)}
    return micro.grid(*quorums, micro.UNEVEN_EIGHT)
