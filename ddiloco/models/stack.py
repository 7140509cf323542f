"""The layers of a model one after another: each by itself, or those that are alike in scanned stacks.

A stack is one layer whose parameters have a leading axis `layer`. It is compiled once, whatever its depth,
and with `remat` the backward pass has the activations of one of its layers at a time.
"""

from __future__ import annotations

from collections.abc import Callable
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


def run(
    layers: nnx.Dict,
    call: Callable[[Any, jax.Array], tuple[jax.Array, Any]],
    x: jax.Array,
    remat: str = "none",
) -> tuple[jax.Array, list[Any]]:
    """Passes `x` through all layers in their order.

    Args:
      layers: as `layers` made them.
      call: `(layer, x) -> (x, told)`, with any tree of arrays that a layer tells.
      x: the first layer's input.
      remat: what the backward pass computes again: `none`, `full`, or all but what this policy of
        `jax.checkpoint_policies` keeps.

    Returns:
      The last layer's output; for each entry of `layers` what was told, with an axis for its layers in front.
    """
    told = []
    for name in sorted(layers, key=lambda name: int(name.partition(":")[0])):
        graph, params = nnx.split(layers[name])

        def step(x: jax.Array, params: Any, graph: nnx.GraphDef = graph) -> tuple[jax.Array, Any]:
            return call(nnx.merge(graph, params), x)

        scanned = is_stack(f"layers/{name}/")
        if remat != "none":
            policy = None if remat == "full" else getattr(jax.checkpoint_policies, remat)
            step = jax.checkpoint(step, policy=policy, prevent_cse=not scanned)  # no need of it in a scan
        if scanned:
            x, of_rows = jax.lax.scan(step, x, params)
        else:
            x, of_layer = step(x, params)
            of_rows = jax.tree.map(lambda leaf: leaf[None], of_layer)
        told.append(of_rows)
    return x, told
