"""Pipeline stages: each has layers of its own, and micro-batches of rows pass from one to the next.

With S stages, R stacks and K micro-batches there are R K + S - 1 turns, in each of which every stage runs its
rows of one stack on one micro-batch. In turn t stage s has micro-batch (t - s) mod K, for the stack
(t - s) div K. What leaves the last stage enters the first again, for the next stack: the schedule is circular
(arXiv 2104.04473, section 2.2), and S - 1 of the turns are idle for a stage, whatever R is.

All stages are one array with an axis of them in front, so that a turn is one `vmap`, and the way to the next
stage a roll of that axis; the backward pass is what JAX derives from it.
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
      layer: `(x, parameters, rows) -> (x, told)` of one layer on a micro-batch; what is told is a tree of
        arrays that add over rows. `inside_stage` of `constrain` is what it may constrain with.
      stacks: trees of parameters, each with an axis of its layers in front, which the stages share evenly.
      x: the first layer's input, (B, ...).
      rows: a tree of arrays (B, ...), of which each micro-batch has its own.
      constrain: knows the stages.
      microbatches: K; a divisor of B, and at least S if there are several stacks.
      remat: what is done to a layer's step for the sake of memory.

    Returns:
      The last layer's output; for each stack what its layers told, with an axis for them in front.
    """
    stages, repeats = constrain.stages, len(stacks)
    inside, stage_S = constrain.inside_stage(), jnp.arange(stages)

    def split(array: jax.Array) -> jax.Array:
        """(B, ...) -> (K, B / K, ...): rows i, i + K, ..., so that each device keeps its own."""
        micro = jnp.swapaxes(array.reshape(-1, microbatches, *array.shape[1:]), 0, 1)
        return inside(micro, (None, "batch", *[None] * (array.ndim - 1)))

    def on_stages(array: jax.Array) -> jax.Array:
        """An array (S, rows, ...), each stage's part on that stage."""
        return constrain(array, ("stage", "batch", *[None] * (array.ndim - 2)))

    def stage(x: jax.Array, rows: Any, repeat: jax.Array, weights: list[Any]) -> tuple[jax.Array, Any]:
        def step(x: jax.Array, of_repeats: list[Any]) -> tuple[jax.Array, Any]:
            # A choice in place of a row of one array: the backward pass keeps no copy of what it chose.
            params = jax.tree.map(lambda *leaves: jax.lax.select_n(repeat, *leaves), *of_repeats)
            return layer(x, params if repeats > 1 else of_repeats[0], rows)

        return jax.lax.scan(remat(step), x, weights)

    of_stages = jax.vmap(stage, spmd_axis_name="stage")
    weights = [jax.tree.map(lambda leaf: leaf.reshape(stages, -1, *leaf.shape[1:]), s) for s in stacks]
    rows_of = jax.tree.map(split, rows)

    def turn(carry: tuple[jax.Array, jax.Array], t: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Any]:
        """`waiting`: what the first stage takes its next input from, and the outputs at the end."""
        waiting, arrived = carry
        is_first = (stage_S == 0).reshape(-1, *[1] * (arrived.ndim - 1))
        entering = jax.lax.dynamic_index_in_dim(waiting, t % microbatches, axis=1, keepdims=False)
        own_rows = jax.tree.map(lambda array: on_stages(array[(t - stage_S) % microbatches]), rows_of)
        repeat = jnp.clip((t - stage_S) // microbatches, 0, repeats - 1)
        left, told = of_stages(jnp.where(is_first, entering, arrived), own_rows, repeat, weights)
        arrived = on_stages(jnp.roll(on_stages(left), 1, axis=0))
        # Before the first output comes, all that wait are inputs.
        place = (t - stages + 1) % microbatches
        there = jax.lax.dynamic_index_in_dim(waiting, place, axis=1, keepdims=False)
        kept = jnp.where(t < stages - 1, there, arrived)
        return (jax.lax.dynamic_update_index_in_dim(waiting, kept, place, axis=1), arrived), told

    inputs = split(x)
    waiting = jnp.broadcast_to(inputs, (stages, *inputs.shape))  # only the first stage reads its copy
    waiting = constrain(waiting, ("stage", None, "batch", *[None] * (x.ndim - 1)))
    begin = waiting, jnp.zeros_like(waiting[:, 0])
    turns = repeats * microbatches
    (waiting, _), told = jax.lax.scan(turn, begin, jnp.arange(turns + stages - 1))
    outputs = jnp.swapaxes(waiting[0], 0, 1).reshape(x.shape)
    outputs = constrain(outputs, ("batch", *[None] * (x.ndim - 1)))

    def of_stack(stack: int) -> Any:
        begin, end = stack * microbatches, (stack + 1) * microbatches

        def added(leaf: jax.Array) -> jax.Array:
            return jnp.concatenate([jnp.sum(leaf[begin + s : end + s, s], axis=0) for s in range(stages)])

        return jax.tree.map(added, told)

    return outputs, [of_stack(stack) for stack in range(repeats)]
