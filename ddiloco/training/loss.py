"""Losses, as sums that add over micro-batches, devices and batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
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
    return _cross_entropy(found, batch["targets"], batch["weights"], z_loss)[0]


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
    sums, correct_B = _cross_entropy(found, batch["label"], batch["weights"], z_loss, judge=True)
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
    sums, right_BxL = _cross_entropy(found, batch["targets"], batch["weights"], z_loss, judge=True)
    counts_BxL = batch["weights"] > 0
    return _answered(sums, jnp.all(right_BxL | ~counts_BxL, axis=-1), jnp.any(counts_BxL, axis=-1))


def _cross_entropy(
    output: Output, targets: jax.Array, weights: jax.Array, z_loss: float, judge: bool = False
) -> tuple[LossSums, jax.Array]:
    """The sums over targets (...); weights (...) are 1 where a target counts, else 0.

    With `judge` also whether each target is the likeliest, bool (...).
    """
    lazy, compared = output.logits, functools.partial(_compared, z_loss=z_loss, judge=judge)
    if isinstance(lazy, LazyLogits) and lazy.chunk < targets.shape[1]:
        objective, nll, right = _in_chunks(lazy, compared, targets, weights)
    else:
        objective, (nll, right) = compared(whole_logits(output), targets, weights)
    return LossSums(objective + output.penalty, nll, jnp.sum(weights), dict(output.sums)), right


def _compared(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, z_loss: float, judge: bool
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Objective and negative log-likelihood, summed, and which targets are the likeliest."""
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    # A masked sum, not a gather: it stays local where the vocabulary is sharded, and needs no scatter.
    is_target = targets[..., None] == jnp.arange(logits.shape[-1])
    of_target = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    counted = weights.astype(jnp.float32)
    nll = jnp.sum((normaliser - of_target) * counted)
    objective = nll + z_loss * jnp.sum(normaliser**2 * counted) if z_loss else nll
    right = jnp.argmax(logits, axis=-1) == targets if judge else jnp.zeros(targets.shape, bool)
    return objective, (nll, right)


Compared = Callable[..., tuple[jax.Array, tuple[jax.Array, jax.Array]]]


def _in_chunks(
    lazy: LazyLogits, compared: Compared, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same as `compared` with the logits of some tokens at a time."""
    size, length = 1 << (lazy.chunk.bit_length() - 1), targets.shape[1]  # a power of two mostly divides it
    whole = length // size * size

    def part(begin: int, end: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        tokens = jax.tree.map(lambda x: x[:, begin:end], (lazy.x, targets, weights))
        chunks = jax.tree.map(lambda x: jnp.swapaxes(x.reshape(len(x), -1, size, *x.shape[2:]), 0, 1), tokens)
        head, kernels = jax.closure_convert(lazy.head, chunks[0][0])
        objective, nll, right = _summed(functools.partial(_chunk, head, compared), kernels, *chunks)
        return objective, nll, jnp.swapaxes(right, 0, 1).reshape(len(targets), -1)

    if whole == length:
        return part(0, length, size)
    objective, nll, right = part(0, whole, size)
    more_objective, more_nll, more_right = part(whole, length, length - whole)
    return objective + more_objective, nll + more_nll, jnp.concatenate([right, more_right], axis=1)


def _chunk(head: Callable[..., jax.Array], compared: Compared, kernels: Any, x: jax.Array, *rest: Any) -> Any:
    return compared(head(x, *kernels), *rest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(chunk: Callable[..., Any], kernels: Any, *chunks: jax.Array) -> Any:
    """The sums of all chunks, and what each tells of its tokens; only the first sum has a gradient.

    The gradient, known but for a factor, is computed with the sums, so that logits are made only once.
    """

    def add(total: Any, chunked: Any) -> tuple[Any, jax.Array]:
        objective, (nll, right) = chunk(kernels, *chunked)
        return (total[0] + objective, total[1] + nll), right

    sums, right = jax.lax.scan(add, (jnp.float32(0), jnp.float32(0)), chunks)
    return *sums, right


def _summed_forward(chunk: Callable[..., Any], kernels: Any, *chunks: jax.Array) -> Any:
    gradient_of = jax.value_and_grad(chunk, argnums=(0, 1), has_aux=True)

    def add(total: Any, chunked: Any) -> tuple[Any, Any]:
        (objective, (nll, right)), (of_kernels, of_x) = gradient_of(kernels, *chunked)
        return jax.tree.map(jnp.add, total, ((objective, nll), of_kernels)), (right, of_x)

    nothing = (jnp.float32(0), jnp.float32(0)), jax.tree.map(jnp.zeros_like, kernels)
    (sums, of_kernels), (right, of_x) = jax.lax.scan(add, nothing, chunks)
    return (*sums, right), (of_kernels, of_x)


def _summed_backward(chunk: Callable[..., Any], gradients: Any, cotangents: Any) -> Any:
    of_kernels, of_x = jax.tree.map(lambda leaf: (leaf * cotangents[0]).astype(leaf.dtype), gradients)
    return of_kernels, of_x, None, None


_summed.defvjp(_summed_forward, _summed_backward)


def _answered(sums: LossSums, correct_B: jax.Array, counts_B: jax.Array) -> LossSums:
    answers = {
        "correct": jnp.sum(correct_B & counts_B, dtype=jnp.float32),
        "answers": jnp.sum(counts_B, dtype=jnp.float32),
    }
    return sums._replace(model={**sums.model, **answers})
