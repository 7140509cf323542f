"""What a model's module returns where logits are not all: terms of the objective, and what it counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax


class Output(NamedTuple):
    """Logits, and sums that add over rows of a batch, so that no grouping of rows changes them."""

    logits: jax.Array
    """Float32."""
    penalty: jax.Array | float = 0.0
    """What the objective has beside the loss, weighted and summed over the tokens, a float32 scalar."""
    sums: Mapping[str, jax.Array] = {}
    """Float32 arrays of any shapes, by name, from which `Model.statistics` makes means."""


def no_statistics(sums: Mapping[str, Any], tokens: Any) -> dict[str, Any]:
    """The `Model.statistics` of a model that counts nothing."""
    del sums, tokens
    return {}
