"""Losses, as sums that add over micro-batches, devices and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ddiloco.models import model_of
from ddiloco.models.model import Output
from ddiloco.models.parameter import Constrain, unconstrained
from ddiloco.training.parameters import output

Batch = Mapping[str, jax.Array]


class LossSums(NamedTuple):
    """Sums over the targets that count; scalars but for the model's own."""

    objective: jax.Array
    """What is minimised: the negative log-likelihood and its regularisers, float32."""
    nll: jax.Array
    """Negative log-likelihood, nats, float32."""
    tokens: jax.Array
    """Targets that count, int32."""
    model: Mapping[str, jax.Array] = {}
    """What else the model or the loss counts, by name, float32 of any shapes."""


def statistics(config: Any, sums: LossSums) -> Mapping[str, Any]:
    """The model's own metrics, scalars by name, from the sums of any number of rows.

    With a loss that counts answers also `accuracy`, the share of them that is correct, in [0, 1].
    """
    metrics = model_of(config).statistics(sums.model, sums.tokens)
    if "answers" not in sums.model:
        return metrics
    answers = sums.model["answers"]
    return {**metrics, "accuracy": sums.model["correct"] / (answers + (answers == 0))}


Loss = Callable[[Any, Mapping[str, jax.Array], Batch, float, Constrain], LossSums]


def next_token_loss(
    config: Any,
    params: Mapping[str, jax.Array],
    batch: Batch,
    z_loss: float = 0.0,
    constrain: Constrain = unconstrained,
) -> LossSums:
    """Cross-entropy of `targets` where `weights` is 1, plus `z_loss` times the squared log-normaliser.

    The z-loss is that of PaLM (arXiv 2204.02311, section 5). The model's penalty is in the objective only.
    """
    inputs = batch["inputs"], batch["positions"], batch["segments"]
    found = output(config, params, *inputs, constrain=constrain)
    return _cross_entropy(found, batch["targets"], batch["weights"], z_loss)


def label_loss(
    config: Any,
    params: Mapping[str, jax.Array],
    batch: Batch,
    z_loss: float = 0.0,
    constrain: Constrain = unconstrained,
) -> LossSums:
    """Cross-entropy of `label` (B,) given `image` (B, H, W, C); correct if the label is the likeliest.

    An image counts as one token. z-loss and penalty as in `next_token_loss`.
    """
    found = output(config, params, batch["image"], constrain=constrain)
    sums = _cross_entropy(found, batch["label"], batch["weights"], z_loss)
    correct_B = jnp.argmax(found.logits, axis=-1) == batch["label"]
    return _answered(sums, correct_B, batch["weights"] > 0)


def caption_loss(
    config: Any,
    params: Mapping[str, jax.Array],
    batch: Batch,
    z_loss: float = 0.0,
    constrain: Constrain = unconstrained,
) -> LossSums:
    """Cross-entropy of `targets` (B, L) given `image` and `inputs`.

    A caption is correct if each target that counts is the likeliest token given those before it, that is, if
    greedy decoding writes it without a mistake. z-loss and penalty as in `next_token_loss`.
    """
    found = output(config, params, batch["image"], batch["inputs"], constrain=constrain)
    sums = _cross_entropy(found, batch["targets"], batch["weights"], z_loss)
    counts_BxL = batch["weights"] > 0
    right_BxL = jnp.argmax(found.logits, axis=-1) == batch["targets"]
    return _answered(sums, jnp.all(right_BxL | ~counts_BxL, axis=-1), jnp.any(counts_BxL, axis=-1))


def _cross_entropy(found: Output, targets: jax.Array, weights: jax.Array, z_loss: float) -> LossSums:
    """The sums over targets (...) with logits (..., V); weights (...) are 1 where a target counts, else 0."""
    logits = found.logits
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    # A masked sum, not a gather: it stays local where the vocabulary is sharded, and needs no scatter.
    vocabulary_V = jnp.arange(logits.shape[-1])
    is_target = targets[..., None] == vocabulary_V
    of_target = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    counted = weights.astype(jnp.float32)
    nll = jnp.sum((normaliser - of_target) * counted)
    objective = nll + z_loss * jnp.sum(normaliser**2 * counted) if z_loss else nll
    return LossSums(objective + found.penalty, nll, jnp.sum(weights), dict(found.sums))


def _answered(sums: LossSums, correct_B: jax.Array, counts_B: jax.Array) -> LossSums:
    answers = {
        "correct": jnp.sum(correct_B & counts_B, dtype=jnp.float32),
        "answers": jnp.sum(counts_B, dtype=jnp.float32),
    }
    return sums._replace(model={**sums.model, **answers})
