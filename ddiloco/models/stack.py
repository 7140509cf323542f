"""The layers of a model one after another: each by itself, or those that are alike in scanned stacks.

A stack is one layer whose parameters have a leading axis `layer`. It is compiled once, whatever its depth,
and with `remat` the backward pass has the activations of one of its layers at a time. On a mesh with stages
the layers of a stack are divided among them (`through_stages`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ddiloco.config import setting
from ddiloco.models.parameter import Constrain
from ddiloco.outer.stacks import is_stack, stack_name

REMAT = ("none", "full", "dots_saveable", "dots_with_no_batch_dims_saveable")
Call = Callable[[Any, jax.Array], tuple[jax.Array, Any]]
Step = Callable[[jax.Array, Any], tuple[jax.Array, Any]]


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


@dataclasses.dataclass(frozen=True)
class TransformerConfig(LayersConfig):
    """What every transformer here has."""

    num_layers: int = setting(4, "transformer layers", at_least=1)
    num_heads: int = setting(4, "attention heads, of queries", at_least=1)
    norm_epsilon: float = setting(
        1e-6, "added to the mean square in RMSNorm, to the variance in LayerNorm", above=0.0
    )
    compute_dtype: str = setting("float32", "type of activations", choices=("bfloat16", "float32"))


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

    def layer(graph: nnx.GraphDef, x: jax.Array, of_row: Any) -> tuple[jax.Array, Any]:
        params, *own = of_row
        return call(nnx.merge(graph, params), x, *own)

    @functools.partial(jax.jit, static_argnums=0)  # so that layers that are alike are traced once
    def alone(graph: nnx.GraphDef, x: jax.Array, of_row: Any) -> tuple[jax.Array, Any]:
        return _remat(functools.partial(layer, graph), remat, scanned=False)(x, of_row)

    aux = []
    for place, name in enumerate(in_order(layers)):
        graph, params = nnx.split(layers[name])
        own = () if each is None else (each[place],)
        if is_stack(f"layers/{name}/"):
            step = _remat(functools.partial(layer, graph), remat, scanned=True)
            x, of_rows = jax.lax.scan(step, x, (params, *own))
        else:
            x, of_layer = alone(graph, x, (params, *jax.tree.map(lambda leaf: leaf[0], own)))
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


def through_stages(
    layer: Callable[[jax.Array, Any, Any], tuple[jax.Array, Any]],
    stacks: Sequence[Any],
    x: jax.Array,
    rows: Any,
    constrain: Constrain,
    microbatches: int,
    remat: Callable[[Step], Step] = lambda step: step,
) -> tuple[jax.Array, list[Any]]:
    """Passes `x` through all layers of all stacks in their order, in micro-batches from stage to stage.

    With S stages, R stacks of layers and K micro-batches there are R K + S - 1 turns, in each of which every
    stage runs its layers of one stack on one micro-batch: in turn t stage s has micro-batch (t - s) mod K,
    for stack (t - s) div K. What leaves the last stage enters the first again, for the next stack. So the
    schedule is circular (arXiv 2104.04473, section 2.2.2), and each stage idles for a share of
    (S - 1) / (R K + S - 1).

    The stages are an axis in front of all arrays: a turn is one `vmap`, the way to the next stage a roll of
    that axis, and the backward pass what JAX derives from them. A stage that idles computes what nobody
    reads.

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
