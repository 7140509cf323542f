"""gamma, the share of the slack that a grace window may use, at a quorum of 1 of eight uneven learners.

  python -m experiments.sweep --sweep=configs/sweeps/gamma.py --output=runs/gamma --jobs=2

18 runs of the micro model (configs/micro.py), all of the same global steps. With gamma 0 nobody is waited
for; from 0.5 on the window is as long as it may be, one step (`sync.max_grace`).
"""

from configs import micro


def get_sweep() -> list[dict]:
    """Each gamma."""
    return micro.grid({"sync.gamma": (0.0, 0.1, 0.2, 0.4, 0.8, 0.95)}, micro.UNEVEN_EIGHT)
