"""One layer's tensor out of a stack whose rows are divided among devices, each of which gets a part of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

Parts = list[tuple[str, ...]]  # the mesh axes of each axis of an array


def row_sharding(stack: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of one row: as in the stack, with the mesh axes of the stack's rows moved to another axis.

    That is the first axis that they divide evenly; without one, the row is not divided by them.

    Example:
      >>> import jax
      >>> from jax.sharding import AbstractMesh
      >>> mesh = AbstractMesh((2, 4), ("stage", "tensor"))
      >>> stack = NamedSharding(mesh, PartitionSpec("stage", None, "tensor"))
      >>> row_sharding(stack, (6, 8)).spec, row_sharding(stack, (5, 8)).spec
      (P('stage', 'tensor'), P(None, ('tensor', 'stage')))
    """
    of_rows, *of_axes = mesh_axes(stack, 1 + len(shape))
    for axis in range(len(shape)) if of_rows else ():
        divided = [(*names, *of_rows) if i == axis else names for i, names in enumerate(of_axes)]
        found = NamedSharding(stack.mesh, spec_of(divided))
        if divides(found, shape):
            return found
    return NamedSharding(stack.mesh, PartitionSpec(*stack.spec[1:]))


def divides(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    """Whether the sharding divides an array of this shape evenly."""
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True


def row_of(stack: jax.Array, row: int, sharding: NamedSharding) -> jax.Array:
    """The row of a stack with this sharding, laid out by `row_sharding`; for use under jit.

    Left to itself, the compiler would move the whole stack.
    """
    names = mesh_axes(sharding, stack.ndim)[0]
    if not names:
        return jax.lax.index_in_dim(stack, row, keepdims=False)
    laid = row_sharding(sharding, stack.shape[1:])
    parts = mesh_axes(laid, stack.ndim - 1)
    axis = next((i for i, part in enumerate(parts) if set(names) <= set(part)), None)
    each = len(stack) // ways(sharding.mesh, names)
    bits = jnp.dtype(f"uint{8 * stack.dtype.itemsize}")  # whose sum with zeros is exact, of -0.0 too

    def part(shard: jax.Array) -> jax.Array:
        own = jax.lax.bitcast_convert_type(shard[row % each], bits)
        own = jnp.where(jax.lax.axis_index(names) == row // each, own, jnp.zeros_like(own))
        if axis is None:
            own = jax.lax.psum(own, names)
        else:
            own = jax.lax.psum_scatter(own, names, scatter_dimension=axis, tiled=True)
        return jax.lax.bitcast_convert_type(own, stack.dtype)

    taken = jax.shard_map(
        part, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=laid.spec, check_vma=False
    )
    return taken(stack)


def ways(mesh: Mesh | AbstractMesh, names: Sequence[str]) -> int:
    """The number of parts into which these axes of a mesh divide an array."""
    return math.prod(mesh.shape[name] for name in names)


def mesh_axes(sharding: NamedSharding, axes: int) -> Parts:
    """The mesh axes that divide each axis of an array with so many."""
    spec = (*sharding.spec, *[None] * (axes - len(sharding.spec)))
    return [(part,) if isinstance(part, str) else tuple(part or ()) for part in spec]


def spec_of(parts: Parts) -> PartitionSpec:
    """The PartitionSpec that says the same."""
    return PartitionSpec(*(part or None for part in parts))
