"""Parameters of models, drawn for tests."""

import numpy as np

from ddiloco.training.parameters import parameter_shapes


def random_parameters(config, seed=0, deviation=0.3):
    """By layer, none at a special value, norms included."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(float(name.endswith("scale")), deviation, shape).astype(np.float32)
        for name, shape in parameter_shapes(config).items()
    }
