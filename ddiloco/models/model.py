"""A model as the rest of the package sees it: settings, module, output, costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx


class LazyLogits(NamedTuple):
    """Logits of tokens over a vocabulary, whose words need not have theirs all at a time."""

    x: jax.Array
    """What the head reads, (B, L, D)."""
    table: jax.Array
    """A row for each word, (V, D)."""
    head: Callable[[jax.Array, jax.Array], jax.Array]
    """`x` and rows of the table, (B, L, D) and (W, D) -> the logits of these words (B, L, W), float32."""
    parts: int
    """Of the vocabulary, whose logits a loss makes one after the other."""
    shards: int
    """Among how many devices the table's rows are divided; each has as many words of every part."""


class Output(NamedTuple):
    """A module's output beyond logits.

    Penalty and sums add over the rows of a batch, so that no grouping of rows changes them.
    """

    logits: jax.Array | LazyLogits
    """Float32."""
    penalty: jax.Array | float = 0.0
    """What the objective adds to the loss, weighted and summed over the tokens; a float32 scalar."""
    sums: Mapping[str, jax.Array] = {}
    """Float32 arrays of any shapes, by name, for `Model.statistics`."""


def whole_logits(logits: jax.Array | LazyLogits) -> jax.Array:
    """The logits of all tokens and words, float32."""
    return logits.head(logits.x, logits.table) if isinstance(logits, LazyLogits) else logits


class Model(NamedTuple):
    """A model, as the `MODEL` of its file."""

    config: type
    """A frozen dataclass of settings."""
    module: Callable[[Any, nnx.Rngs], nnx.Module]
    """Made as `module(config, rngs)`, with every parameter from `ddiloco.models.parameter.parameter`.

    It is called with the arrays of the task's rows, each (B, ...), and with `constrain`, and returns float32
    logits or an `Output`.
    """
    flops_per_token: Callable[[Any, int], float]
    """`(config, length) -> operations` of a training step, forward and backward, for each token of a row."""
    statistics: Callable[[Mapping[str, Any], Any], Mapping[str, Any]] = lambda sums, tokens: {}
    """`(sums, tokens) -> metrics`: scalars by name, from the sums of any number of rows and their tokens.

    It runs on traced arrays in the step and on float64 arrays in the evaluation.
    """
    idle_parameters: Callable[[Any], int] | None = None
    """`config ->` the number of parameters that a token does not pass; None: it passes all."""
    sampling: Callable[[Any], Any] = lambda config: config
    """`config ->` the settings to sample with, of the same parameters.

    With them a token's output depends on itself and those before it only, however many pass at a time.
    """
    task: str = "language_modelling"
    """Its name in `ddiloco.tasks.TASKS`."""
