"""tau, the steps that a round may overlap, over links that take half a step each way.

  python -m experiments.sweep --sweep=configs/sweeps/overlap.py --output=runs/overlap --jobs=2

15 runs of the micro model (configs/micro.py) with four uneven learners, at equal tokens. tau bounds the
rounds in flight and gives the slack that a grace window is taken from: with too little, merges lack learners.
"""

from configs import micro

TOKENS = 240 * 16 * 128


def get_sweep() -> list[dict]:
    """Each tau."""
    places = {"virtual.latency": (0.5,), **micro.UNEVEN, "train.tokens": TOKENS}
    return micro.grid({"sync.overlap": (0, 1, 2, 4, 8)}, {name: (value,) for name, value in places.items()})
