"""The outer learning rate and momentum of Nesterov.

  python -m experiments.sweep --sweep=configs/sweeps/outer.py --output=runs/outer --jobs=2

48 runs of the micro model (configs/micro.py). The effective step of a steady outer gradient is rate / (1 -
momentum); the kinds of outer optimizer are compared in configs/sweeps/outer_optimizer.py.
"""

from configs import micro


def get_sweep() -> list[dict]:
    """Each rate with each momentum."""
    rates = {"outer.learning_rate": (0.35, 0.5, 0.7, 1.0)}
    return micro.grid(rates, {"outer.momentum": (0.0, 0.3, 0.6, 0.9)})
