"""tau, the steps that a round may overlap, over links that take a quarter or half of a step each way.

  python -m experiments.sweep --sweep=configs/sweeps/overlap.py --output=runs/overlap --jobs=2

24 runs of the micro model (configs/micro.py), at equal tokens, whose steps vary by 5%. tau gives the slack
that a grace window is taken from, after the time on the links; and as many rounds may merge at a time.
"""

from configs import micro


def get_sweep() -> list[dict]:
    """Each tau with each latency."""
    links = {"virtual.latency": ((0.25,), (0.5,))}
    same = {"virtual.step_variation": (0.05,), "train.tokens": (240 * 16 * 128,)}
    return micro.grid({"sync.overlap": (0, 1, 2, 4)}, links, same)
