"""Shardings: how the logical axes of parameters, batches and activations lie on a learner's mesh."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddiloco.models.parameter import Axes, Constrain
from ddiloco.training.mesh import MESH_AXES
from ddiloco.training.parameters import abstract_parameters, logical_axes

RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "expert": ("expert",),
    "head_dim": (),
    "layer": (),
}


def partition(mesh: Mesh, axes: Axes, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of an array by its logical axes, from the left; each mesh axis is used at most once.

    An axis that has no name, or whose size does not divide evenly, is not sharded.
    """
    parts: list[tuple[str, ...] | None] = []
    free = {name for name in MESH_AXES if mesh.shape[name] > 1}
    for axis, size in zip(axes, shape, strict=True):
        targets = tuple(name for name in RULES[axis] if name in free) if axis is not None else ()
        ways = math.prod(mesh.shape[name] for name in targets)
        fits = bool(targets) and size % ways == 0
        parts.append(targets if fits else None)
        free.difference_update(targets if fits else ())
    return NamedSharding(mesh, PartitionSpec(*parts))


def parameter_shardings(model_config: Any, mesh: Mesh) -> dict[str, NamedSharding]:
    """The sharding of each parameter of the model, by name."""
    shapes = abstract_parameters(model_config)
    return {
        name: partition(mesh, axes, shapes[name].shape) for name, axes in logical_axes(model_config).items()
    }


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of the arrays (B, ...) of a batch: rows over data, fsdp and expert."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def rows_divisor(mesh: Mesh) -> int:
    """The number that the rows of a batch must be a multiple of."""
    return math.prod(mesh.shape[name] for name in RULES["batch"])


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of what every device of the mesh has whole."""
    return NamedSharding(mesh, PartitionSpec())


@dataclasses.dataclass(frozen=True)
class OnMesh(Constrain):
    """Constrains an activation to the sharding of its logical axes on this mesh."""

    mesh: Mesh

    def __call__(self, x: jax.Array, axes: Axes) -> jax.Array:
        """As in `Constrain`; on one device there is nothing to constrain."""
        if self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, partition(self.mesh, axes, x.shape))

    def spec(self, axes: Axes, shape: tuple[int, ...]) -> PartitionSpec:
        """As in `Constrain`."""
        return partition(self.mesh, axes, shape).spec

    def local_rows(self, rows: int) -> int:
        """As in `Constrain`."""
        (local,) = partition(self.mesh, ("batch",), (rows,)).shard_shape((rows,))
        return local


def constrainer(mesh: Mesh) -> Constrain:
    """Constrains activations on this mesh."""
    return OnMesh(mesh)
