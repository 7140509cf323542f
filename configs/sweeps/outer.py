"""The outer learning rate and momentum of Nesterov.

  python -m experiments.sweep --sweep=configs/sweeps/outer.py[:FAMILY] --output=runs/outer-FAMILY --jobs=2

48 runs of the dense micro model (configs/micro.py) for 240 steps; 27 of another FAMILY for 480, as images
take longer to be learnt. The effective step of a steady outer gradient is rate / (1 - momentum); the kinds
of outer optimizer are compared in configs/sweeps/outer_optimizer.py.
"""

from configs import micro, sections


def get_sweep(family: str = "dense") -> list[dict]:
    """Each rate with each momentum."""
    if family == "dense":
        rates = {"outer.learning_rate": (0.35, 0.5, 0.7, 1.0)}
        return micro.grid(rates, {"outer.momentum": (0.0, 0.3, 0.6, 0.9)})
    (family,) = sections.words(family, tuple(micro.FAMILIES))
    rates, momenta = {"outer.learning_rate": (0.5, 0.7, 1.0)}, {"outer.momentum": (0.0, 0.3, 0.6)}
    return micro.grid(rates, momenta, {"train.steps": (480,)}, config=f"configs/micro.py:{family}")
