"""Pipeline stages: each has layers of its own, and micro-batches of rows pass from one to the next.

With S stages, R stacks of layers and K micro-batches there are R K + S - 1 turns, in each of which every
stage runs its layers of one stack on one micro-batch: in turn t stage s has micro-batch (t - s) mod K, for
stack (t - s) div K. What leaves the last stage enters the first again, for the next stack. So the schedule is
circular (arXiv 2104.04473, section 2.2.2), and each stage idles for a share of (S - 1) / (R K + S - 1).

The stages are an axis in front of all arrays: a turn is one `vmap`, the way to the next stage a roll of that
axis, and the backward pass what JAX derives from them. A stage that idles computes what nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ddiloco.models.parameter import Constrain

Step = Callable[[jax.Array, Any], tuple[jax.Array, Any]]


def through_stages(
    layer: Callable[[jax.Array, Any, Any], tuple[jax.Array, Any]],
    stacks: Sequence[Any],
    x: jax.Array,
    rows: Any,
    constrain: Constrain,
    microbatches: int,
    remat: Callable[[Step], Step] = lambda step: step,
) -> tuple[jax.Array, list[Any]]:
    """Passes `x` through all layers of all stacks in their order.

    Args:
      layer: `(x, parameters, rows) -> (x, aux)` of one layer on a micro-batch; `aux` is a tree of
        arrays that add over rows. `inside_stage` of `constrain` is what it may constrain with.
      stacks: trees of parameters, each with an axis of its layers in front, which the stages share evenly.
      x: the first layer's input, (B, ...).
      rows: a tree of arrays (B, ...), of which each micro-batch has its own.
      microbatches: K; a divisor of B, and at least S if there are several stacks.
      remat: what is done to a layer's step for the sake of memory.

    Returns:
      The last layer's output; for each stack its layers' `aux`, with an axis for them in front.
    """
    stages, repeats = constrain.stages, len(stacks)
    stage_S = jnp.arange(stages)
    rows = jax.tree.map(lambda array: _split(array, microbatches, constrain), rows)
    weights = [jax.tree.map(lambda leaf: leaf.reshape(stages, -1, *leaf.shape[1:]), s) for s in stacks]

    def stage(x: jax.Array, rows: Any, repeat: jax.Array, weights: list[Any]) -> tuple[jax.Array, Any]:
        def step(x: jax.Array, of_stacks: list[Any]) -> tuple[jax.Array, Any]:
            # Not a row of one array: that would be a copy of all weights. Where it is computed again, the
            # backward pass has no copy of what each turn chose either.
            chosen = jax.tree.map(lambda *leaves: jax.lax.select_n(repeat, *leaves), *of_stacks)
            return layer(x, chosen if repeats > 1 else of_stacks[0], rows)

        return jax.lax.scan(remat(step), x, weights)

    of_stages = jax.vmap(stage, spmd_axis_name="stage")

    def turn(carry: tuple[jax.Array, jax.Array], t: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Any]:
        waiting, arrived = carry
        entering = _get(waiting, t % microbatches)
        is_first = (stage_S == 0).reshape(-1, *[1] * (arrived.ndim - 1))
        own = jax.tree.map(lambda a: _on_stages(a[(t - stage_S) % microbatches], constrain), rows)
        repeat = jnp.clip((t - stage_S) // microbatches, 0, repeats - 1)
        left, aux = of_stages(jnp.where(is_first, entering, arrived), own, repeat, weights)
        arrived = _on_stages(jnp.roll(_on_stages(left, constrain), 1, axis=0), constrain)
        place = (t - stages + 1) % microbatches
        # Before the first micro-batch has come through, all that wait are inputs.
        kept = jnp.where(t < stages - 1, _get(waiting, place), arrived)
        return (jax.lax.dynamic_update_index_in_dim(waiting, kept, place, axis=1), arrived), aux

    inputs = _split(x, microbatches, constrain)
    # What waits for the first stage, and at last the outputs. The other stages' copies are never read.
    waiting = jnp.broadcast_to(inputs, (stages, *inputs.shape))
    waiting = constrain(waiting, ("stage", None, "batch", *[None] * (x.ndim - 1)))
    turns = jnp.arange(repeats * microbatches + stages - 1)
    (waiting, _), aux = jax.lax.scan(turn, (waiting, jnp.zeros_like(waiting[:, 0])), turns)
    outputs = jnp.swapaxes(waiting[0], 0, 1).reshape(x.shape)
    of_stacks = [
        jax.tree.map(lambda leaf, r=r: _added(leaf, r * microbatches, microbatches), aux)
        for r in range(repeats)
    ]
    return constrain(outputs, ("batch", *[None] * (x.ndim - 1))), of_stacks


def _split(array: jax.Array, parts: int, constrain: Constrain) -> jax.Array:
    """(B, ...) -> (K, B / K, ...): rows i, i + K, ..., so that each device keeps its own."""
    micro = jnp.swapaxes(array.reshape(-1, parts, *array.shape[1:]), 0, 1)
    return constrain.inside_stage()(micro, (None, "batch", *[None] * (array.ndim - 1)))


def _on_stages(array: jax.Array, constrain: Constrain) -> jax.Array:
    """An array (S, rows, ...), the part of each stage on that stage."""
    return constrain(array, ("stage", "batch", *[None] * (array.ndim - 2)))


def _get(waiting: jax.Array, place: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(waiting, place, axis=1, keepdims=False)


def _added(aux: jax.Array, begin: int, count: int) -> jax.Array:
    """A stack's `aux`, summed over micro-batches; of all turns it is (turns, S, layers of a stage, ...)."""
    stages = range(aux.shape[1])
    return jnp.concatenate([jnp.sum(aux[begin + s : begin + s + count, s], axis=0) for s in stages])
