"""A training loop of your own (docs/your_own.md), by default that of experiments/examples/plain_loop.py.

  python -m experiments.train --config=configs/loop.py[:ALGORITHM] --config.model.factory=module:function

ALGORITHM
  decoupled (default), streaming, diloco
"""

from ml_collections import ConfigDict

from configs import dense


def get_config(algorithm: str = "decoupled") -> ConfigDict:
    """The settings around a loop: those of the tiny preset, for a loop with few parameters."""
    config = dense.get_config(f"tiny,{algorithm},paper")
    del config.data, config.inner, config.sample  # a loop has its own
    config.model = ConfigDict()
    config.model.name = "loop"
    config.model.factory = "experiments.examples.plain_loop:make_loop"  # or file.py:function
    config.model.settings = ConfigDict()  # what the function gets by name, besides its place
    config.train.steps = 240
    if algorithm != "diloco":
        config.sync.num_fragments = 2  # there must be as many tensors
    config.sync.interval = 8
    return config
