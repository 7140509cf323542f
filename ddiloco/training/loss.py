"""The loss of next-token prediction, as sums that add over micro-batches, devices and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ddiloco.models.parameter import Constrain, unconstrained
from ddiloco.training.parameters import forward

Batch = Mapping[str, jax.Array]


class LossSums(NamedTuple):
    """Sums over the targets that count; all scalars."""

    objective: jax.Array
    """What the gradient is of: the negative log-likelihood and what regularises it, float32."""
    nll: jax.Array
    """Negative log-likelihood, nats, float32."""
    tokens: jax.Array
    """Targets that count, int32."""


Loss = Callable[[Any, Mapping[str, jax.Array], Batch, float, Constrain], LossSums]


def next_token_loss(
    config: Any,
    params: Mapping[str, jax.Array],
    batch: Batch,
    z_loss: float = 0.0,
    constrain: Constrain = unconstrained,
) -> LossSums:
    """Cross-entropy of `targets` where `weights` is 1, plus `z_loss` times the squared log-normaliser.

    The z-loss is that of PaLM (arXiv 2204.02311, section 5).
    """
    logits_BxLxV = forward(config, params, batch["inputs"], batch["positions"], batch["segments"], constrain)
    normaliser_BxL = jax.nn.logsumexp(logits_BxLxV, axis=-1)
    # A masked sum, not a gather: it stays local where the vocabulary is sharded, and needs no scatter.
    vocabulary_V = jnp.arange(logits_BxLxV.shape[-1])
    is_target_BxLxV = batch["targets"][..., None] == vocabulary_V
    target_BxL = jnp.sum(jnp.where(is_target_BxLxV, logits_BxLxV, 0.0), axis=-1)
    weights_BxL = batch["weights"].astype(jnp.float32)
    nll = jnp.sum((normaliser_BxL - target_BxL) * weights_BxL)
    objective = nll + z_loss * jnp.sum(normaliser_BxL**2 * weights_BxL) if z_loss else nll
    return LossSums(objective, nll, jnp.sum(batch["weights"]))
