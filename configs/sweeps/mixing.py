"""alpha, the share of its own value that a learner keeps when an update arrives, by the number of learners.

  python -m experiments.sweep --sweep=configs/sweeps/mixing.py --output=runs/mixing --jobs=2

24 runs of the micro model (configs/micro.py) at an equal global batch. Links take half a step each way, so
that a learner has taken a step or two since the offer that an update was made from: what alpha 0
overwrites.
"""

from configs import micro

LEARNERS = {"sync.num_learners": (2, 8), "train.batch_size": (8, 2)}


def get_sweep() -> list[dict]:
    """Each alpha with few learners and with many."""
    links = {"virtual.latency": ((0.5,),), "sync.rebase": (False,)}
    return micro.grid({"sync.mixing": (0.0, 0.25, 0.5, 0.75)}, LEARNERS, links)
