"""How the parameters are cut into fragments: balanced, by layer, by tensor.

  python -m experiments.sweep --sweep=configs/sweeps/fragmentation.py --output=runs/fragmentation --jobs=2

18 runs of the micro model (configs/micro.py), with 4 and with 12 fragments. Paper: no difference in quality
(55.4, 55.3, 55.4), balanced has the flattest bandwidth.
"""

from configs import micro


def get_sweep() -> list[dict]:
    """Each strategy with each number of fragments."""
    strategies = {"outer.fragmentation": ("balanced", "layer", "tensor")}
    return micro.grid(strategies, {"sync.num_fragments": (4, 12)})
