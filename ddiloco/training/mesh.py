"""Meshes: the devices divided among the learners, and each one's by axis."""

from __future__ import annotations

import collections
import dataclasses
import math
import warnings
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from ddiloco.config import ConfigError, setting

MESH_AXES = ("slice", "data", "stage", "fsdp", "context", "tensor", "expert")
MAX_EXPERT_SHARDS = 8  # by default: more would leave too few experts to each


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of one learner's mesh; one may be -1, or fsdp and expert both, meaning what the others leave."""

    slice: int = setting(
        1, "TPU slices, joined by the data-center network (DCN); each has copies of the model", at_least=1
    )
    data: int = setting(-1, "copies of the model in a slice, each with rows of its own; -1 is what is left")
    stage: int = setting(
        1, "pipeline stages, each with layers of its own; outside of layers like fsdp; -1 is what is left"
    )
    fsdp: int = setting(1, "shards of the parameters, each with rows of its own; -1 is what is left")
    context: int = setting(
        1,
        "shards of each row's positions, and in attention of its heads; outside of layers like fsdp; -1 is "
        "what is left",
    )
    tensor: int = setting(1, "shards of heads, MLP and vocabulary; -1 is what is left")
    expert: int = setting(
        1,
        "shards of the experts, each with rows of its own; -1 is what is left, "
        f"and where fsdp is -1 too at most {MAX_EXPERT_SHARDS} of it",
    )

    def __post_init__(self) -> None:
        for axis, size in zip(MESH_AXES, self.sizes, strict=True):
            if size < 1 and size != -1:
                raise ValueError(f"{axis}: is {size}, but must be at least 1, or -1 for what is left")
        free = [axis for axis, size in zip(MESH_AXES, self.sizes, strict=True) if size == -1]
        if len(free) > 1 and free != ["fsdp", "expert"]:
            raise ValueError(f"{free[1]}: is -1, but {free[0]} is too; only one size may be what is left")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes in the order of MESH_AXES."""
        return tuple(getattr(self, axis) for axis in MESH_AXES)

    def shape(self, num_devices: int) -> tuple[int, ...]:
        """The sizes over `num_devices`, with -1 resolved; raises ConfigError where they do not fit."""
        fixed = math.prod(size for size in self.sizes if size != -1)
        sizes = zip(MESH_AXES, self.sizes, strict=True)
        asked = " x ".join(f"{axis}={size}" for axis, size in sizes if size != 1) or "one device a learner"
        free = -1 in self.sizes
        fits = num_devices % fixed == 0 if free else num_devices == fixed
        if not fits:
            wanted = f"a multiple of {fixed}" if free else f"{fixed}"
            raise ConfigError(f"mesh: {asked} needs {wanted} devices, but a learner has {num_devices}")
        left = num_devices // fixed
        if self.fsdp == self.expert == -1:
            expert = math.gcd(left, MAX_EXPERT_SHARDS)
            return dataclasses.replace(self, fsdp=left // expert, expert=expert).shape(num_devices)
        return tuple(left if size == -1 else size for size in self.sizes)


def carve(devices: Sequence[jax.Device], num_learners: int, config: MeshConfig) -> list[Mesh]:
    """A mesh for each learner, of contiguous equal groups of the devices, slice by slice.

    With fewer devices than learners, learner m uses device m mod N. Devices that do not divide evenly stay
    idle, with a warning.

    Raises:
      ConfigError: the mesh does not fit the devices that a learner has, or the slices that they are of.
    """
    devices = sorted(devices, key=_slice_index)
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
    return [Mesh(_arranged(group, shape), MESH_AXES) for group in groups]


def _slice_index(device: jax.Device) -> int:
    """The TPU slice of a device; other devices are of none, and any of them can stand for a slice."""
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def _arranged(devices: Sequence[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
    """The devices in a mesh whose axes lie along those of the interconnect, as far as that goes.

    The first axis, and no other, leads from slice to slice.

    Raises:
      ConfigError: the devices are of more slices or fewer, or of unequal parts of them.
    """
    slices, *inside = shape
    each = len(devices) // slices
    if devices[0].platform == "tpu":
        sizes = collections.Counter(map(_slice_index, devices))
        if set(sizes.values()) != {each}:
            found = ", ".join(f"{size} of slice {index}" for index, size in sizes.items())
            raise ConfigError(f"mesh.slice: is {slices}, but the devices of a learner are {found}")
    parts = [_in_slice(devices[n * each : (n + 1) * each], tuple(inside)) for n in range(slices)]
    return np.stack(parts)


def _in_slice(devices: Sequence[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
    try:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (AssertionError, NotImplementedError, ValueError):  # they are no box of a torus
        return np.asarray(devices).reshape(shape)
