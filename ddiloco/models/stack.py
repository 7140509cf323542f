"""The layers of a model one after another: each by itself, or those that are alike in scanned stacks.

A stack is one layer whose parameters have a leading axis `layer`. It is compiled once, whatever its depth,
and with `remat` the backward pass has the activations of one of its layers at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ddiloco.outer.stacks import is_stack, stack_name

REMAT = ("none", "full", "dots_saveable", "dots_with_no_batch_dims_saveable")


def layers(make: Callable[[int], nnx.Module], first: int, stop: int, stacked: bool) -> dict[str, nnx.Module]:
    """The layers `first` to `stop - 1`, by number or as one stack; `make(number)` makes one."""
    made = {str(number): make(number) for number in range(first, stop)}
    if not stacked or not made:
        return made
    parts = [nnx.split(layer) for layer in made.values()]
    graph, states = parts[0][0], [state for _, state in parts]
    rows = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    return {stack_name(first, stop): nnx.merge(graph, rows)}


def in_order(layers: nnx.Dict) -> list[str]:
    """The entries of what `layers` made, the first layers first."""
    return sorted(layers, key=lambda name: int(name.partition(":")[0]))


def depth(name: str) -> int:
    """How many layers an entry of that name has."""
    first, _, stop = name.partition(":")
    return int(stop) - int(first) if stop else 1


def run(
    layers: nnx.Dict,
    call: Callable[..., tuple[jax.Array, Any]],
    x: jax.Array,
    remat: str = "none",
    each: Sequence[Any] | None = None,
) -> tuple[jax.Array, list[Any]]:
    """Passes `x` through all layers in their order.

    Args:
      layers: as `layers` made them.
      call: `(layer, x) -> (x, told)`, with any tree of arrays that a layer tells; with `each` it is
        `(layer, x, own)`.
      x: the first layer's input.
      remat: what the backward pass computes again: `none`, `full`, or all but what this policy of
        `jax.checkpoint_policies` keeps.
      each: for each entry of `layers`, in their order, what its layers get of their own: a tree of arrays
        with an axis for the layers in front, such as `run` returns.

    Returns:
      The last layer's output; for each entry of `layers` what was told, with an axis for its layers in front.
    """
    told = []
    for place, name in enumerate(in_order(layers)):
        graph, params = nnx.split(layers[name])
        own = () if each is None else (each[place],)

        def step(x: jax.Array, rows: tuple[Any, ...], graph: nnx.GraphDef = graph) -> tuple[jax.Array, Any]:
            params, *own = rows
            return call(nnx.merge(graph, params), x, *own)

        scanned = is_stack(f"layers/{name}/")
        if remat != "none":
            policy = None if remat == "full" else getattr(jax.checkpoint_policies, remat)
            step = jax.checkpoint(step, policy=policy, prevent_cse=not scanned)  # no need of it in a scan
        if scanned:
            x, of_rows = jax.lax.scan(step, x, (params, *own))
        else:
            x, of_layer = step(x, (params, *jax.tree.map(lambda leaf: leaf[0], own)))
            of_rows = jax.tree.map(lambda leaf: leaf[None], of_layer)
        told.append(of_rows)
    return x, told
