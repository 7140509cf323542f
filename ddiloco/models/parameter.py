"""A model's parameter: its initial values, and the logical names of its axes, by which it is sharded."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

Axes = tuple[str | None, ...]

# Of the standard normal distribution truncated at two deviations.
TRUNCATED_DEVIATION = 0.8796256610342398
PADDED = 2**20  # elements of the largest array that is sampled in another size than its own


@dataclasses.dataclass(frozen=True)
class Normal:
    """Draws float32 from a normal distribution truncated at two deviations; `stddev` is after truncation."""

    stddev: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return _truncated(key, shape, self.stddev / TRUNCATED_DEVIATION)

    def sample(self, seed: np.uint32, name: np.uint32, shape: tuple[int, ...]) -> jax.Array:
        """The same by a key of seed and name, on the default device.

        Random numbers compile slowly. An array begins with the numbers of a smaller one, so that all of about
        the same size are sampled by one program.
        """
        scale, size = np.float32(self.stddev / TRUNCATED_DEVIATION), math.prod(shape)
        if size > PADDED:
            return _sample(seed, name, scale, shape)
        padded = np.asarray(_sample(seed, name, scale, (1 << (size - 1).bit_length(),)))
        return jnp.asarray(padded[:size].reshape(shape))


@dataclasses.dataclass(frozen=True)
class Constant:
    """The same float32 value everywhere."""

    value: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        del key
        return jnp.full(shape, self.value, jnp.float32)

    def sample(self, seed: np.uint32, name: np.uint32, shape: tuple[int, ...]) -> jax.Array:
        """The same, on the default device."""
        del seed, name
        return jnp.asarray(np.full(shape, self.value, np.float32))


Initializer = Normal | Constant


def _truncated(key: jax.Array, shape: tuple[int, ...], scale: jax.Array | float) -> jax.Array:
    return jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32) * scale


@functools.partial(jax.jit, static_argnums=3)
def _sample(seed: jax.Array, name: jax.Array, scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return _truncated(jax.random.fold_in(jax.random.key(seed), name), shape, scale)


def parameter(rngs: nnx.Rngs, shape: tuple[int, ...], axes: Axes, initializer: Initializer) -> nnx.Param:
    """A parameter that remembers its logical axes and its initializer."""
    value = _initial(initializer, shape, rngs.params())
    return nnx.Param(value, logical_axes=axes, initializer=initializer)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _initial(initializer: Initializer, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    return initializer(key, shape)  # jitted, so that layers that are alike are traced once


class Constrain:
    """Pins activations to the layout of their logical axes; this one leaves it to the compiler."""

    mesh: Mesh | None = None
    """The devices; None: not known, as where nothing is sharded."""
    stages: int = 1
    """Pipeline stages among which stacks of layers are divided."""

    def __call__(self, x: jax.Array, axes: Axes) -> jax.Array:
        del axes
        return x

    def spec(self, axes: Axes, shape: tuple[int, ...]) -> PartitionSpec:
        """The sharding of an array of this shape."""
        del axes, shape
        return PartitionSpec()

    def inside_stage(self) -> Constrain:
        """The same for what one stage computes, whose rows are not divided among the stages."""
        return self

    def local(self, axis: str, size: int) -> int:
        """A device's part of a logical axis of this size."""
        del axis
        return size


unconstrained = Constrain()
