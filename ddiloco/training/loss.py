"""Losses, as sums that add over micro-batches, devices and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ddiloco.models import model_of
from ddiloco.models.model import LazyLogits, Output, whole_logits
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
        normaliser, of_target, right = _by_target(found, batch[targets], judge)
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


def _by_target(output: Output, targets: jax.Array, judge: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-normaliser and logit of each target, float32, and whether it is the likeliest; all (...).

    Of lazy logits a chunk of tokens exists at a time, and once more for the gradient.
    """
    lazy = output.logits
    if not isinstance(lazy, LazyLogits) or lazy.chunk >= targets.shape[1]:
        return _compared(whole_logits(output), targets, judge)

    @jax.checkpoint
    def compared(chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        return _compared(lazy.head(chunk[0]), chunk[1], judge)

    size = 1 << (lazy.chunk.bit_length() - 1)  # a power of two, which mostly divides the length
    whole = targets.shape[1] // size * size

    def chunks(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x[:, :whole].reshape(len(x), -1, size, *x.shape[2:]), 0, 1)

    in_chunks = jax.lax.map(compared, (chunks(lazy.x), chunks(targets)))
    found = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, whole), in_chunks)
    if whole == targets.shape[1]:
        return found
    rest = compared((lazy.x[:, whole:], targets[:, whole:]))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), found, rest)


def _compared(logits: jax.Array, targets: jax.Array, judge: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same from logits (..., V)."""
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    # A masked sum, not a gather: it stays local where the vocabulary is sharded, and needs no scatter.
    is_target = targets[..., None] == jnp.arange(logits.shape[-1])
    of_target = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    right = jnp.argmax(logits, axis=-1) == targets if judge else jnp.zeros(targets.shape, bool)
    return normaliser, of_target, right
