"""Meshes: devices divided among the learners, and the sharding of logical axes over a mesh."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddiloco.config import ConfigError, setting
from ddiloco.models.parameter import Axes, Constrain, unconstrained
from ddiloco.training.parameters import abstract_parameters, logical_axes

MESH_AXES = ("data", "fsdp", "tensor", "expert")

RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "expert": ("expert",),
    "head_dim": (),
}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of one learner's mesh; at most one is -1, which means what the others leave."""

    data: int = setting(-1, "copies of the model, each with rows of its own; -1 is what is left")
    fsdp: int = setting(1, "shards of the parameters, each with rows of its own; -1 is what is left")
    tensor: int = setting(1, "shards of heads, MLP and vocabulary; -1 is what is left")
    expert: int = setting(1, "shards of the experts, each with rows of its own; -1 is what is left")

    def __post_init__(self) -> None:
        for axis, size in zip(MESH_AXES, self.sizes, strict=True):
            if size < 1 and size != -1:
                raise ValueError(f"{axis}: is {size}, but must be at least 1, or -1 for what is left")
        free = [axis for axis, size in zip(MESH_AXES, self.sizes, strict=True) if size == -1]
        if len(free) > 1:
            raise ValueError(f"{free[1]}: is -1, but {free[0]} is too; only one size may be what is left")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The four sizes in the order of MESH_AXES."""
        return tuple(getattr(self, axis) for axis in MESH_AXES)

    def shape(self, num_devices: int) -> tuple[int, ...]:
        """The four sizes over `num_devices`, with -1 resolved; raises ConfigError where they do not fit."""
        fixed = math.prod(size for size in self.sizes if size != -1)
        asked = " x ".join(f"{axis}={size}" for axis, size in zip(MESH_AXES, self.sizes, strict=True))
        shape = tuple(num_devices // fixed if size == -1 else size for size in self.sizes)
        if math.prod(shape) != num_devices:
            wanted = f"a multiple of {fixed}" if -1 in self.sizes else f"{fixed}"
            raise ConfigError(f"mesh: {asked} needs {wanted} devices, but a learner has {num_devices}")
        return shape


def carve(devices: Sequence[jax.Device], num_learners: int, config: MeshConfig) -> list[Mesh]:
    """A mesh for each learner, of contiguous equal groups of the devices.

    With fewer devices than learners, learner m uses device m mod N. Devices that do not divide evenly stay
    idle, with a warning.

    Raises:
      ConfigError: the mesh does not fit the devices that a learner has.
    """
    if num_learners < 1:
        raise ConfigError(f"num_learners: is {num_learners}, but must be at least 1")
    if not devices:
        raise ConfigError("mesh: there are no devices")
    each = len(devices) // num_learners
    groups: list[Sequence[jax.Device]]
    if each == 0:
        shape = config.shape(1)
        groups = [[devices[m % len(devices)]] for m in range(num_learners)]
    else:
        shape = config.shape(each)
        groups = [devices[m * each : (m + 1) * each] for m in range(num_learners)]
        idle = len(devices) - each * num_learners
        if idle:
            warnings.warn(
                f"{idle} of {len(devices)} devices stay idle: {num_learners} learners have {each} each",
                stacklevel=2,
            )
    return [Mesh(np.asarray(group).reshape(shape), MESH_AXES) for group in groups]


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


def constrainer(mesh: Mesh) -> Constrain:
    """Constrains an activation to the sharding of its logical axes on this mesh."""
    if mesh.size == 1:
        return unconstrained

    def constrain(x: jax.Array, axes: Axes) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, partition(mesh, axes, x.shape))

    return constrain
