"""The layers of a model one after another: each by itself, or those that are alike in scanned stacks.

A stack is one layer whose parameters have a leading axis `layer`. It is compiled once, whatever its depth,
and with `remat` the backward pass has the activations of one of its layers at a time. On a mesh with stages
the layers of a stack are divided among them (`ddiloco.models.pipeline`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ddiloco.config import setting
from ddiloco.models.parameter import Constrain
from ddiloco.models.pipeline import Step, through_stages
from ddiloco.outer.stacks import is_stack, stack_name

REMAT = ("none", "full", "dots_saveable", "dots_with_no_batch_dims_saveable")
Call = Callable[[Any, jax.Array], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class LayersConfig:
    """Storage and execution of a model's layers, without effect on the results."""

    scan_layers: bool = setting(
        False, "stack layers that are alike, to compile them once for all", both_ends=False
    )
    remat: str = setting(
        "none",
        "what of a layer the backward pass computes again: all, or what this policy of JAX does not keep",
        choices=REMAT,
        both_ends=False,
        may_change="resume",
    )
    stage_microbatches: int | None = setting(
        None,
        "parts of a step's rows, which pass mesh.stage one behind another; None: as many as there are stages",
        at_least=1,
        both_ends=False,
        may_change="resume",
    )
    stage_repeats: int = setting(
        1,
        "how often a row passes each of mesh.stage, for fewer layers at a time: the stages idle for less",
        at_least=1,
        both_ends=False,
    )

    def check_repeats(self, name: str, layers: int) -> None:
        """Raises ValueError unless this many layers, the setting `name`, can be stacked as configured."""
        if self.stage_repeats > 1 and not self.scan_layers:
            raise ValueError(f"scan_layers: is False, but stage_repeats {self.stage_repeats} needs stacks")
        if layers % self.stage_repeats:
            raise ValueError(
                f"stage_repeats: is {self.stage_repeats}, but must be a divisor of {name} {layers}"
            )


def layers(
    make: Callable[[int], nnx.Module], first: int, stop: int, config: LayersConfig
) -> dict[str, nnx.Module]:
    """The layers `first` to `stop - 1`, by number or in `stage_repeats` stacks; `make(number)` makes one."""
    made = {str(number): make(number) for number in range(first, stop)}
    if not config.scan_layers or not made:
        return made
    each = len(made) // config.stage_repeats
    return {
        stack_name(begin, begin + each): _stacked([made[str(n)] for n in range(begin, begin + each)])
        for begin in range(first, stop, each)
    }


def _stacked(alike: list[nnx.Module]) -> nnx.Module:
    parts = [nnx.split(layer) for layer in alike]
    graph, states = parts[0][0], [state for _, state in parts]
    return nnx.merge(graph, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))


def in_order(layers: nnx.Dict) -> list[str]:
    """The entries of what `layers` made, the first layers first."""
    return sorted(layers, key=lambda name: int(name.partition(":")[0]))


def depth(name: str) -> int:
    """Number of layers of an entry of that name."""
    first, _, stop = name.partition(":")
    return int(stop) - int(first) if stop else 1


def run(
    layers: nnx.Dict,
    caller: Callable[..., Call],
    x: jax.Array,
    rows: tuple[jax.Array, ...],
    constrain: Constrain,
    config: LayersConfig,
) -> tuple[jax.Array, list[Any]]:
    """Passes `x` through all layers in their order.

    Args:
      layers: as `layers` made them; on a mesh with stages only stacks.
      caller: `(constrain, *rows) -> call`, and `call` is `(layer, x) -> (x, aux)`; aux is any tree of
        arrays that add over rows.
      x: the first layer's input (B, ...).
      rows: what else a layer needs of each row, arrays (B, ...). With stages a call has only some rows.
      constrain: for activations outside of stages.

    Returns:
      The last layer's output; for each entry of `layers` its `aux`, with an axis for its layers in front.
    """
    if constrain.stages > 1:
        stacks = [layers[name] for name in in_order(layers)]
        return _through_stages(stacks, caller, x, rows, constrain, config)
    return one_by_one(layers, caller(constrain, *rows), x, config.remat)


def one_by_one(
    layers: nnx.Dict,
    call: Callable[..., tuple[jax.Array, Any]],
    x: jax.Array,
    remat: str = "none",
    each: Sequence[Any] | None = None,
) -> tuple[jax.Array, list[Any]]:
    """As `run` without stages.

    Args:
      layers: as `layers` made them.
      call: as what `run` is given returns; with `each` it is `(layer, x, own) -> (x, aux)`.
      each: for each entry of `layers`, in their order, what its layers get of their own: a tree of arrays
        with an axis for the layers in front, such as is returned.
    """
    aux = []
    for place, name in enumerate(in_order(layers)):
        graph, params = nnx.split(layers[name])
        own = () if each is None else (each[place],)

        def layer(x: jax.Array, of_row: Any, graph: nnx.GraphDef = graph) -> tuple[jax.Array, Any]:
            params, *own = of_row
            return call(nnx.merge(graph, params), x, *own)

        scanned = is_stack(f"layers/{name}/")
        step = _remat(layer, remat, scanned)
        if scanned:
            x, of_rows = jax.lax.scan(step, x, (params, *own))
        else:
            x, of_layer = step(x, (params, *jax.tree.map(lambda leaf: leaf[0], own)))
            of_rows = jax.tree.map(lambda leaf: leaf[None], of_layer)
        aux.append(of_rows)
    return x, aux


def _through_stages(
    stacks: list[nnx.Module],
    caller: Callable[..., Call],
    x: jax.Array,
    rows: tuple[jax.Array, ...],
    constrain: Constrain,
    config: LayersConfig,
) -> tuple[jax.Array, list[Any]]:
    """Layers of one kind, which have `stage_repeats` stacks, and then those of the next."""
    aux, inside = [], constrain.inside_stage()
    for begin in range(0, len(stacks), config.stage_repeats):
        parts = [nnx.split(stack) for stack in stacks[begin : begin + config.stage_repeats]]

        def layer(x: jax.Array, params: Any, rows: Any, graph: Any = parts[0][0]) -> tuple[jax.Array, Any]:
            return caller(inside, *rows)(nnx.merge(graph, params), x)

        x, of_stacks = through_stages(
            layer,
            [state for _, state in parts],
            x,
            rows,
            constrain,
            config.stage_microbatches or constrain.stages,
            lambda step: _remat(step, config.remat, scanned=True),
        )
        aux += of_stacks
    return x, aux


def _remat(step: Step, remat: str, scanned: bool) -> Step:
    if remat == "none":
        return step
    policy = None if remat == "full" else getattr(jax.checkpoint_policies, remat)
    return jax.checkpoint(step, policy=policy, prevent_cse=not scanned)  # no need of it in a scan
