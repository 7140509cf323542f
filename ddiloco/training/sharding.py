"""Shardings of parameters, batches and activations on a learner's mesh, by their logical axes."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddiloco.arrays.sharded_rows import Parts, spec_of, ways
from ddiloco.config import ConfigError
from ddiloco.models.parameter import Axes, Constrain
from ddiloco.models.stack import LayersConfig
from ddiloco.outer.stacks import is_stack
from ddiloco.outer.stacks import rows as rows_of_stack
from ddiloco.training.mesh import MESH_AXES
from ddiloco.training.parameters import abstract_parameters, logical_axes

RULES: dict[str, tuple[str, ...]] = {
    "batch": ("slice", "data", "fsdp", "expert", "stage"),
    "copy": ("slice", "data"),
    "length": ("context",),
    "embed": ("fsdp", "context", "expert", "stage"),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "query_heads": ("tensor", "context"),  # in attention, where each device has all positions
    "key_heads": ("tensor", "context"),
    "mlp": ("tensor",),
    "expert": ("expert",),
    "head_dim": (),
    "layer": ("stage",),
    "stage": ("stage",),
}
LARGE = 0.01  # share of the parameters above which an array must be divided by all mesh axes of its rules
_LAYER = re.compile(r"\blayers/[\d:]+/")


def partition(
    mesh: Mesh, axes: Axes, shape: tuple[int, ...], free: Sequence[str] = MESH_AXES
) -> NamedSharding:
    """The sharding of an array by its logical axes, from the left; each mesh axis is used at most once.

    An axis of the array takes, of its `free` mesh axes, those that divide it into the most parts. If the
    array has an axis of experts, the mesh axis `expert` divides no other.
    """
    return NamedSharding(mesh, spec_of(_parts(mesh, axes, shape, free)))


def parameter_shardings(model_config: Any, mesh: Mesh) -> dict[str, NamedSharding]:
    """The sharding of each parameter of the model, by name.

    A mesh axis that does not divide what it should of a large one, such as 259 tokens or two heads of keys,
    divides another axis of it.
    """
    shapes = {name: leaf.shape for name, leaf in abstract_parameters(model_config).items()}
    shares, found = _shares(shapes), {}
    for name, axes in logical_axes(model_config).items():
        parts = _parts(mesh, axes, shapes[name])
        if shares[name] > LARGE:
            _spill(mesh, axes, shapes[name], parts)
        found[name] = NamedSharding(mesh, spec_of(parts))
    return found


def check_divided(model_config: Any, mesh: Mesh) -> None:
    """Raises ConfigError if a large parameter lies whole on devices that should have shared it."""
    shapes = {name: leaf.shape for name, leaf in abstract_parameters(model_config).items()}
    shares, shardings = _shares(shapes), parameter_shardings(model_config, mesh)
    for name, axes in logical_axes(model_config).items():
        missing = _missing(mesh, axes, [part or () for part in shardings[name].spec])
        if shares[name] > LARGE and missing:
            size = " x ".join(f"{axis or 'unnamed'} {n}" for axis, n in zip(axes, shapes[name], strict=True))
            field = f"config.mesh.{missing[0]}: is {mesh.shape[missing[0]]}"
            whole = (
                f"{shares[name]:.1%} of the parameters in all layers, which each device along it would hold"
            )
            raise ConfigError(f"{field}, but divides no axis of {name} ({size}): {whole} whole")


def check_context(model_config: Any, mesh: Mesh, rows: int) -> None:
    """Checks that heads and rows divide among the devices that share a row's positions, if there are several.

    `rows`: of a step, in one micro-batch.

    Raises:
      ConfigError: they do not.
    """
    shards = mesh.shape["context"]
    if shards == 1:
        return
    heads, ways_of_heads = getattr(model_config, "num_heads", 0), ways(mesh, RULES["query_heads"])
    if not heads or heads % ways_of_heads:
        whose = f"the model's {heads} heads" if heads else "heads, which the model has not"
        problem = f"is {shards}, but mesh.tensor times it, {ways_of_heads}, must divide {whose}"
        raise ConfigError(f"config.mesh.context: {problem}")
    if mesh.shape["stage"] > 1:
        raise ConfigError(f"config.mesh.context: is {shards}, but must be 1 where mesh.stage is more")
    each = rows_divisor(mesh)
    # More rows would move at each projection, for which rows and positions are one axis.
    if rows != each:
        problem = f"is {shards}, which needs micro-batches of {each} rows, and they have {rows}"
        raise ConfigError(f"config.mesh.context: {problem} (train.batch_size, inner.accumulation)")


def check_stages(model_config: Any, mesh: Mesh, rows: Mapping[str, int]) -> None:
    """Checks that layers and rows divide among the mesh's pipeline stages, if it has several.

    `rows`: how many a program has at a time, by the setting that says so.

    Raises:
      ConfigError: they do not.
    """
    stages = mesh.shape["stage"]
    if stages == 1:
        return
    if not isinstance(model_config, LayersConfig) or not model_config.scan_layers:
        raise ConfigError(f"config.mesh.stage: is {stages}, but needs stacks of layers (model.scan_layers)")
    for count in (len(rows_of_stack(name)) for name in abstract_parameters(model_config) if is_stack(name)):
        if count % stages:
            raise ConfigError(f"config.mesh.stage: is {stages}, but must divide a stack of {count} layers")
    parts = model_config.stage_microbatches or stages
    if model_config.stage_repeats > 1 and parts < stages:
        least = f"must be at least mesh.stage {stages}, since stage_repeats is {model_config.stage_repeats}"
        raise ConfigError(f"config.model.stage_microbatches: is {parts}, but {least}")
    shards = rows_divisor(mesh) // stages
    for name, count in rows.items():
        if count % (parts * shards):
            why = f"{parts} micro-batches (model.stage_microbatches) of rows for each of {shards} shards"
            problem = f"gives {count} rows at a time, but must give a multiple of {parts * shards}"
            raise ConfigError(f"config.{name}: {problem}: {why}")


def _parts(mesh: Mesh, axes: Axes, shape: tuple[int, ...], free: Sequence[str] = MESH_AXES) -> Parts:
    """The mesh axes of each axis of an array."""
    parts: Parts = []
    left = {name for name in free if mesh.shape[name] > 1}
    for axis, size in zip(axes, shape, strict=True):
        targets = [name for name in _rule(axis, axes) if name in left]
        choices = (c for n in range(len(targets), -1, -1) for c in itertools.combinations(targets, n))
        fitting = [choice for choice in choices if size % ways(mesh, choice) == 0]
        parts.append(max(fitting, key=lambda choice: ways(mesh, choice)))
        left.difference_update(parts[-1])
    return parts


def _shares(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, float]:
    """The share of the parameters that arrays of each name have, all layers together."""
    kinds: dict[str, int] = collections.defaultdict(int)
    for name, shape in shapes.items():
        kinds[_LAYER.sub("", name)] += math.prod(shape)
    return {name: kinds[_LAYER.sub("", name)] / sum(kinds.values()) for name in shapes}


def _spill(mesh: Mesh, axes: Axes, shape: tuple[int, ...], parts: Parts) -> None:
    """Gives each mesh axis that should have divided the array, and does not, to another axis of it."""
    for name in _missing(mesh, axes, parts):
        for i, (axis, size) in enumerate(zip(axes, shape, strict=True)):
            kept = axis in (None, "layer") or (name == "expert" and "expert" in axes)
            if not kept and size % (ways(mesh, parts[i]) * mesh.shape[name]) == 0:
                parts[i] = (*parts[i], name)
                break


def _missing(mesh: Mesh, axes: Axes, parts: Sequence[tuple[str, ...]]) -> list[str]:
    """The mesh axes that should have divided an array of these axes, and do not."""
    wanted = dict.fromkeys(name for axis in axes for name in _rule(axis, axes) if mesh.shape[name] > 1)
    return [name for name in wanted if not any(name in part for part in parts)]


def _rule(axis: str | None, axes: Axes) -> tuple[str, ...]:
    if axis is not None and axis not in RULES:
        known = f"None, for one that no mesh axis divides, or one of {', '.join(RULES)}"
        raise ConfigError(f"config.model: has an array with the axes {axes}; {axis!r} must be {known}")
    targets = RULES[axis] if axis is not None else ()
    if axis == "expert" or "expert" not in axes or axis == "batch":
        return targets
    return tuple(name for name in targets if name != "expert")


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of the arrays (B, ...) of a batch: rows over all axes but tensor and context."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def rows_divisor(mesh: Mesh) -> int:
    """The number that the rows of a batch must be a multiple of."""
    return ways(mesh, RULES["batch"])


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of what every device of the mesh has whole."""
    return NamedSharding(mesh, PartitionSpec())


@dataclasses.dataclass(frozen=True)
class OnMesh(Constrain):
    """Constrains an activation to the sharding of its logical axes on this mesh."""

    mesh: Mesh
    free: tuple[str, ...] = MESH_AXES

    @property
    def stages(self) -> int:  # type: ignore[override]
        return self.mesh.shape["stage"]

    def inside_stage(self) -> Constrain:
        return dataclasses.replace(self, free=tuple(name for name in self.free if name != "stage"))

    def __call__(self, x: jax.Array, axes: Axes) -> jax.Array:
        """As in `Constrain`; on one device there is nothing to constrain."""
        if self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, partition(self.mesh, axes, x.shape, self.free))

    def spec(self, axes: Axes, shape: tuple[int, ...]) -> PartitionSpec:
        return partition(self.mesh, axes, shape, self.free).spec

    def local(self, axis: str, size: int) -> int:
        (local,) = partition(self.mesh, (axis,), (size,), self.free).shard_shape((size,))
        return local
