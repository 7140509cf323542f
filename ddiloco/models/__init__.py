"""The models by name: a new one is a file in this package and a line in `MODELS`.

A model is a frozen dataclass of settings, an NNX module `module(config, rngs)` whose every parameter comes
from `ddiloco.models.parameter.parameter`, and a count of operations. The module maps `inputs`, `positions`
and `segments`, each (B, L) int32, to logits (B, L, V) float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flax import nnx

from ddiloco.models import dense


class Model(NamedTuple):
    """What a name stands for."""

    config: type
    module: type[nnx.Module]
    flops_per_token: Callable[[Any, int], float]


MODELS: dict[str, Model] = {
    "dense": Model(dense.DenseConfig, dense.Decoder, dense.flops_per_token),
}


def model_of(config: Any) -> Model:
    """The model that these settings are of; raises TypeError for settings of no model."""
    for model in MODELS.values():
        if type(config) is model.config:
            return model
    raise TypeError(f"{type(config).__name__} is not the settings of a model; there are {', '.join(MODELS)}")


def flops_per_token(config: Any, seq_len: int) -> float:
    """Operations of one training step for each token (forward and backward), in rows of `seq_len` tokens."""
    return model_of(config).flops_per_token(config, seq_len)
