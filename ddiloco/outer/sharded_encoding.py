"""Encodes a tensor where its shards lie, so that no device ever holds more of it than its share.

A codec works on groups of neighbours in row-major order. Shards that cut through groups first change places:
a mesh axis then divides another axis of the tensor, by an all-to-all, never a gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from ddiloco.outer.codecs import Codec
from ddiloco.outer.sharded_rows import Parts, mesh_axes, spec_of, ways


class Encoded(NamedTuple):
    """The codec's arrays, and what it decodes them to, of the tensor's shape.

    The arrays are those of `Codec.encode` but for their shape: row by row they have the same elements.
    """

    arrays: tuple[jax.Array, ...]
    decoded: jax.Array


def encode_sharded(codec: Codec, value: jax.Array, sharding: NamedSharding | None) -> Encoded:
    """Encodes a tensor that lies as `sharding` says; None: on one device. Pure, for use under jit."""
    rows = _axes_before_groups(value.shape, codec.group)
    if sharding is None or sharding.is_fully_replicated or rows is None:
        return _encoded(codec, value, 0, flat=True)
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    parts = _without_cut_groups(mesh, value.shape, mesh_axes(sharding, value.ndim), rows, codec.group)
    laid, outside = spec_of(parts), spec_of(parts[: rows + 1])
    count = len(codec.formats(value.shape))
    value = jax.lax.with_sharding_constraint(value, NamedSharding(mesh, laid))
    encode: Callable[[jax.Array], Any] = jax.shard_map(
        lambda shard: tuple(_encoded(codec, shard, rows)),
        mesh=mesh,
        in_specs=laid,
        out_specs=((outside,) * count, laid),
        check_vma=False,
    )
    return Encoded(*encode(value))


def _encoded(codec: Codec, value: jax.Array, rows: int, flat: bool = False) -> Encoded:
    arrays = codec.encode(value)
    shaped = arrays if flat else tuple(array.reshape(*value.shape[:rows], -1) for array in arrays)
    return Encoded(shaped, codec.decode(arrays, value.shape))


def _axes_before_groups(shape: tuple[int, ...], group: int) -> int | None:
    """How many axes can be cut anywhere: those before the shortest tail of whole groups; None: no tail is.

    >>> _axes_before_groups((8, 4, 64), group=64), _axes_before_groups((8, 4, 64), group=128)
    (2, 1)
    >>> _axes_before_groups((3, 5), group=64) is None
    True
    """
    tails = [n for n in range(len(shape)) if math.prod(shape[n:]) % group == 0]
    return max(tails, default=None)


def _without_cut_groups(mesh: Mesh, shape: tuple[int, ...], parts: Parts, rows: int, group: int) -> Parts:
    """Moves the mesh axes that cut groups to the first axis that can take them; drops those of no place."""

    def fits(axis: int, names: tuple[str, ...]) -> bool:
        count = ways(mesh, names)
        shard = shape[axis] // count * math.prod(shape[axis + 1 :])
        return shape[axis] % count == 0 and (axis < rows or (axis == rows and shard % group == 0))

    found = [part if fits(axis, part) or not part else () for axis, part in enumerate(parts)]
    for name in (name for part, kept in zip(parts, found, strict=True) if part and not kept for name in part):
        place = next((axis for axis in range(rows + 1) if fits(axis, (*found[axis], name))), None)
        if place is not None:
            found[place] = (*found[place], name)
    return found
