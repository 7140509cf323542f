"""What a model's file says of itself to the rest of the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax import nnx

from ddiloco.models.output import no_statistics


class Model(NamedTuple):
    """A model, as `MODEL` in its file."""

    config: type
    """A frozen dataclass of settings."""
    module: type[nnx.Module]
    """Made as `module(config, rngs)`, with every parameter from `ddiloco.models.parameter.parameter`.

    It is called with the arrays of the task's rows, each (B, ...), and with `constrain`, and gives float32
    logits or an `Output`.
    """
    flops_per_token: Callable[[Any, int], float]
    """`(config, length) -> operations` of one training step for each token, in rows of `length` tokens."""
    statistics: Callable[[Mapping[str, Any], Any], Mapping[str, Any]] = no_statistics
    """`(sums, tokens) -> metrics`: scalars from the sums of any number of rows and their targets that count.

    Runs on traced arrays in the step and on float64 ones in the evaluation.
    """
    idle_parameters: Callable[[Any], int] | None = None
    """Of the settings, how many of the parameters a token does not pass; None: it passes all."""
    task: str = "language_modelling"
    """Of `ddiloco.tasks.TASKS`: what it is trained to do, and on what rows."""
