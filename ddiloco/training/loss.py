"""Losses, as sums that add over micro-batches, devices and batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ddiloco.models import model_of
from ddiloco.models.model import LazyLogits
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

    If the loss counts answers, also `accuracy`, the share of them that is correct, in [0, 1].
    """
    metrics = model_of(config).statistics(sums.model, sums.tokens)
    if "answers" not in sums.model:
        return metrics
    answers = sums.model["answers"]
    return {**metrics, "accuracy": sums.model["correct"] / (answers + (answers == 0))}


Loss = Callable[[Any, Mapping[str, jax.Array], Batch, float, Constrain], LossSums]


def _loss_of(inputs: Sequence[str], targets: str, judge: bool = False) -> Loss:
    """Cross-entropy of the targets where `weights` is 1, given these arrays of a batch.

    `z_loss` times the squared log-normaliser is added (PaLM, arXiv 2204.02311, section 5). The model's
    penalty is in the objective only. With `judge`, a row is an answer, and it is correct if each of its
    targets that counts is the likeliest.
    """

    def loss(
        config: Any,
        params: Mapping[str, jax.Array],
        batch: Batch,
        z_loss: float = 0.0,
        constrain: Constrain = unconstrained,
    ) -> LossSums:
        found = output(config, params, *(batch[name] for name in inputs), constrain=constrain)
        normaliser, of_target, right = _by_target(found.logits, batch[targets], judge)
        counted = batch["weights"].astype(jnp.float32)
        nll = jnp.sum((normaliser - of_target) * counted)
        objective = nll + z_loss * jnp.sum(normaliser**2 * counted) if z_loss else nll
        sums = dict(found.sums)
        if judge:
            counts = batch["weights"] > 0
            of_row = tuple(range(1, counts.ndim))
            answers_B = jnp.any(counts, axis=of_row)
            correct_B = jnp.all(right | ~counts, axis=of_row) & answers_B
            sums["correct"] = jnp.sum(correct_B, dtype=jnp.float32)
            sums["answers"] = jnp.sum(answers_B, dtype=jnp.float32)
        return LossSums(objective + found.penalty, nll, jnp.sum(batch["weights"]), sums)

    return loss


next_token_loss = _loss_of(("inputs", "positions", "segments"), "targets")
label_loss = _loss_of(("image",), "label", judge=True)
"""Of `label` (B,) given `image` (B, H, W, C); an image counts as one token."""
caption_loss = _loss_of(("image", "inputs"), "targets", judge=True)
"""Of `targets` (B, L); a caption is correct if greedy decoding writes it without a mistake."""


class _Seen(NamedTuple):
    """Figures of each target over the parts of the vocabulary so far; float32 but for `best`, all (B, L)."""

    largest: jax.Array
    """The largest logit."""
    total: jax.Array
    """The sum of exp(logit - largest)."""
    of_target: jax.Array
    """The target's logit; 0 until its part has been computed."""
    best: jax.Array
    """The word with the largest logit."""


def _by_target(
    logits: jax.Array | LazyLogits, targets: jax.Array, judge: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-normaliser and logit of each target, float32, and whether it is the likeliest; all (...).

    Lazy logits are computed one part of the vocabulary at a time, and again for the gradient.
    """
    if not isinstance(logits, LazyLogits):
        return _compared(logits, targets, judge)
    # Float32, since the parts' gradients are summed in the dtype of x.
    x_BxLxD, words = logits.x.astype(jnp.float32), len(logits.table)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def meet(seen: _Seen, part: tuple[jax.Array, jax.Array]) -> tuple[_Seen, None]:
        table_WxD, names_W = part
        logits_BxLxW = logits.head(x_BxLxD, table_WxD)
        of_target = seen.of_target + _picked(logits_BxLxW, targets, names_W)
        logits_BxLxW = jnp.where(names_W < words, logits_BxLxW, -jnp.inf)
        largest = jax.lax.stop_gradient(jnp.max(logits_BxLxW, axis=-1))
        top = jnp.maximum(seen.largest, largest)
        total = seen.total * jnp.exp(seen.largest - top)
        total += jnp.sum(jnp.exp(logits_BxLxW - top[..., None]), axis=-1)
        best = seen.best
        if judge:
            likeliest = names_W[jnp.argmax(logits_BxLxW, axis=-1)]
            level = (largest == seen.largest) & (likeliest < best)
            best = jnp.where((largest > seen.largest) | level, likeliest, best)
        return _Seen(top, total, of_target, best), None

    nothing = jnp.zeros(targets.shape, jnp.float32)
    seen = _Seen(nothing - jnp.inf, nothing, nothing, jnp.zeros_like(targets))
    seen, _ = jax.lax.scan(meet, seen, _in_parts(logits))
    return seen.largest + jnp.log(seen.total), seen.of_target, seen.best == targets


def _in_parts(logits: LazyLogits) -> tuple[jax.Array, jax.Array]:
    """The table (parts, W, D), and the words of its rows (parts, W).

    Each device's own rows are divided, so that all devices have some of every part. Rows of words beyond the
    vocabulary fill up the last.
    """
    words, parts, shards = len(logits.table), logits.parts, logits.shards
    added = -words % (parts * shards)

    def divided(x: jax.Array) -> jax.Array:
        by_device = x.reshape(shards, parts, -1, *x.shape[1:])
        return jnp.swapaxes(by_device, 0, 1).reshape(parts, -1, *x.shape[1:])

    table = jnp.pad(logits.table, ((0, added), (0, 0))) if added else logits.table
    return divided(table), divided(jnp.arange(words + added))


def _compared(logits: jax.Array, targets: jax.Array, judge: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same from logits (..., V)."""
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    right = jnp.argmax(logits, axis=-1) == targets if judge else jnp.zeros(targets.shape, bool)
    return normaliser, _picked(logits, targets, jnp.arange(logits.shape[-1])), right


def _picked(logits: jax.Array, targets: jax.Array, words: jax.Array) -> jax.Array:
    """The logit of each target, 0 if it is none of these words."""
    # A masked sum, not a gather: it stays local where the vocabulary is sharded, and needs no scatter.
    return jnp.sum(jnp.where(targets[..., None] == words, logits, 0.0), axis=-1)
