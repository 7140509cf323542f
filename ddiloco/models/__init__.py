"""The models by name: a new one is a file in this package and a line in `MODELS`.

A model is a frozen dataclass of settings, an NNX module `module(config, rngs)` whose every parameter comes
from `ddiloco.models.parameter.parameter`, and a count of operations. The module maps `inputs`, `positions`
and `segments`, each (B, L) int32, to logits (B, L, V) float32, or to an `Output`: logits, penalty and sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax import nnx

from ddiloco.models import captioner, dense, moe, vit
from ddiloco.models.output import no_statistics


class Model(NamedTuple):
    """What a name stands for."""

    config: type
    module: type[nnx.Module]
    flops_per_token: Callable[[Any, int], float]
    statistics: Callable[[Mapping[str, Any], Any], Mapping[str, Any]] = no_statistics
    """`(sums, tokens) -> metrics`: scalars from the sums of any number of rows and their targets that count.

    Runs on traced arrays in the step and on float64 ones in the evaluation.
    """
    idle_parameters: Callable[[Any], int] | None = None
    """Of the settings, how many of the parameters a token does not pass; None: it passes all."""
    task: str = "language_modelling"
    """Of `ddiloco.tasks.TASKS`: what it is trained to do, and on what rows."""


MODELS: dict[str, Model] = {
    "dense": Model(dense.DenseConfig, dense.Decoder, dense.flops_per_token),
    "moe": Model(
        moe.MoEConfig,
        moe.Decoder,
        moe.flops_per_token,
        statistics=moe.statistics,
        idle_parameters=moe.idle_parameters,
    ),
    "vit": Model(vit.ViTConfig, vit.ViT, vit.flops_per_token, task="classification"),
    "captioner": Model(
        captioner.CaptionerConfig, captioner.Captioner, captioner.flops_per_token, task="captioning"
    ),
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
