"""Encoded fragments: learners' offers, encoded shard by shard on their devices, and the syncer's versions.

A learner sends its outer gradient Theta_p(version) - theta_{m,p}, piece by piece, which can be added to any
version; only where all send in f32, and without rebase, its parameters theta_{m,p}. From these the syncer
subtracts its current version of the fragment, and its core drops those computed from an older one.

A new version is sent whole in f32, or as its difference from the last one. Then the version is the last one
plus the decoded difference, so that every learner has the same one to the bit; the codec's error is added to
the next difference.

A codec works on groups of neighbours in row-major order. Tensors are encoded shard by shard, so that no
device ever holds more than its share: if shards cut through groups, an all-to-all, never a gather, lays them
out anew first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ddiloco.arrays.host_memory import aligned
from ddiloco.arrays.sharded_rows import Parts, mesh_axes, spec_of, ways
from ddiloco.outer.codecs import CODECS, UPDATE_CODECS, ArrayFormat, Codec, Shape
from ddiloco.outer.fragments import FragmentLayout
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.outer.programs import described, shared

Arrays = Sequence[Any]
Tensors = tuple[jax.Array, ...]


class InvalidContribution(ValueError):
    """An offer that cannot be merged; the message names the problem."""


def wire_format(layout: FragmentLayout, fragment: int, codec: str) -> tuple[ArrayFormat, ...]:
    """Shapes and dtypes of the arrays that a learner sends for a fragment, in their order.

    Raises:
      KeyError: there is no such codec.
    """
    shapes = layout.piece_shapes(fragment)
    return tuple(part for shape in shapes for part in CODECS[codec].formats(shape))


def encoded_bytes(layout: FragmentLayout, codec: str) -> tuple[int, ...]:
    """Bytes of each fragment as a learner sends it."""
    fragments = range(layout.num_fragments)
    return tuple(sum(part.nbytes for part in wire_format(layout, p, codec)) for p in fragments)


class Traffic(NamedTuple):
    """Bytes of each fragment, by what of it travels."""

    version: tuple[int, ...]  # whole, to a learner
    offers: tuple[tuple[int, ...], ...]  # to the syncer, by learner; those beyond are as the last
    difference: tuple[int, ...]  # to a learner that has the version before

    def offer(self, learner: int) -> tuple[int, ...]:
        """Of a learner's offers, to the syncer."""
        return self.offers[min(learner, len(self.offers) - 1)]


def traffic(layout: FragmentLayout, config: OuterConfig) -> Traffic:
    """The wire format of fragments under these settings."""
    sizes = {codec: encoded_bytes(layout, codec) for codec in ("f32", *config.codecs, config.update_codec)}
    return Traffic(
        sizes["f32"], tuple(sizes[codec] for codec in config.each_codec), sizes[config.update_codec]
    )


def encode(
    codec: Codec,
    pieces: Arrays,
    anchor: Arrays,
    residual: Arrays = (),
    shardings: Sequence[NamedSharding | None] | None = None,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Encodes the outer gradient of a fragment; pure, for use under jit.

    Args:
      codec: of the outer gradients.
      pieces: theta_{m,p}, float32.
      anchor: Theta_p(version) that the learner last adopted, of the same shapes.
      residual: what the last encoding left out, of the same shapes, to be sent along; (): no error feedback.
      shardings: where the pieces lie, so that each is encoded shard by shard; None: on one device.

    Returns:
      The arrays of `wire_format`, with shardings in shapes that may differ, and what this encoding leaves
      out, as `residual` for the next. A piece with values that are not finite leaves zeros, or they would
      come back in every encoding after it.

    Example:
      >>> import jax.numpy as jnp
      >>> theta, anchor = jnp.array([0.0, 0.9]), jnp.array([1.0, 1.0])
      >>> arrays, residual = encode(CODECS["int4"], (theta,), (anchor,), (jnp.zeros(2),))
      >>> print(residual[0].round(3))
      [ 0.    -0.043]
    """
    arrays: list[jax.Array] = []
    left: list[jax.Array] = []
    shardings = shardings or [None] * len(pieces)
    for i, (piece, origin, sharding) in enumerate(zip(pieces, anchor, shardings, strict=True)):
        value = origin - piece
        if residual:
            value = value + residual[i]
        encoded = encode_sharded(codec, value, sharding)
        arrays.extend(encoded.arrays)
        if residual:
            sound = jnp.isfinite(jnp.sum(jnp.square(value)))
            left.append(jnp.where(sound, value - encoded.decoded, 0.0))
    return tuple(arrays), tuple(left)


def check_format(layout: FragmentLayout, p: int, codec: str, arrays: Sequence[np.ndarray]) -> None:
    """Raises InvalidContribution if arrays, which may be anything, are not those of `wire_format`."""
    expected = wire_format(layout, p, codec)
    if len(arrays) != len(expected):
        raise InvalidContribution(
            f"fragment {p} in {codec} has {len(expected)} arrays, but {len(arrays)} came"
        )
    for i, (array, (shape, dtype)) in enumerate(zip(arrays, expected, strict=True)):
        if array.dtype != dtype or tuple(array.shape) != shape:
            raise InvalidContribution(
                f"array {i} of fragment {p} in {codec} is {array.dtype}{list(array.shape)}, "
                f"but must be {dtype}{list(shape)}"
            )


def by_piece(codec: str, shapes: Sequence[Shape], arrays: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The encoded arrays of each piece of these shapes."""
    left = iter(arrays)
    return [tuple(next(left) for _ in CODECS[codec].formats(shape)) for shape in shapes]


class FragmentDecoder:
    """Applies encoded differences, on the CPU; for any number of threads at a time once compiled."""

    def __init__(self, layout: FragmentLayout, codec: str) -> None:
        """Compiles nothing yet."""
        self._layout = layout
        self._name, self._codec = codec, CODECS[codec]

    def compile(self, fragments: Sequence[int] | None = None) -> None:
        """Compiles for these fragments, None: for all, so that no round waits for it."""
        if not self._codec.exact:
            for p in range(self._layout.num_fragments) if fragments is None else fragments:
                for shape in self._layout.piece_shapes(p):
                    _applying(self._name, shape)

    def __call__(self, p: int, arrays: Sequence[np.ndarray], anchor: Sequence[np.ndarray]) -> Sequence[Any]:
        """The pieces, float32, whose values are still to be validated; with f32 they are the arrays.

        They have the codec's error, and float32's own, at most 2^-24 of the parameter.

        Args:
          arrays: what came, which may be anything.
          anchor: what the difference is taken from, float32.

        Raises:
          InvalidContribution: the arrays are not those of `wire_format`; raised before decoding takes memory.
        """
        check_format(self._layout, p, self._name, arrays)
        if self._codec.exact:
            return arrays
        encoded, origins = ([aligned(np.asarray(x)) for x in group] for group in (arrays, anchor))
        shapes = self._layout.piece_shapes(p)
        own = by_piece(self._name, shapes, encoded)
        pieces = [_applying(self._name, shape)(*x) for shape, *x in zip(shapes, own, origins, strict=True)]
        return tuple(map(np.asarray, pieces))


class Difference(NamedTuple):
    """One step of a fragment from a version to the next."""

    arrays: tuple[np.ndarray, ...]  # the arrays on the wire, in the codec's `wire_format`
    # The next version, which a `FragmentDecoder` of the codec makes of the arrays and the last one
    pieces: Tensors
    left_out: Tensors  # what the codec left out, in the pieces' shapes


class DifferenceEncoder:
    """Encodes on the CPU, tensor by tensor; its only state is compiled code.

    What travels is computed by one program, the version from it by another: within one, XLA might compute a
    code twice and round it in two ways.
    """

    def __init__(self, layout: FragmentLayout, codec: str) -> None:
        """Compiles nothing yet. `codec`: one of `UPDATE_CODECS`, not f32."""
        self._layout, self._codec = layout, codec

    def compile(self, p: int) -> None:
        """Compiles for fragment p, unless that was done."""
        for shape in self._layout.piece_shapes(p):
            _encoding(self._codec, shape)

    def __call__(
        self, p: int, last: Sequence[np.ndarray | jax.Array], new: Tensors, left_out: Tensors
    ) -> Difference:
        """Encodes a step of fragment p, and waits for the result.

        Args:
          last: the version before, numpy or on the CPU device.
          new: what the outer step made of it; its memory is taken.
          left_out: by earlier updates; its memory is taken.
        """
        sent: list[jax.Array] = []
        read = []
        shapes = self._layout.piece_shapes(p)
        for shape, old, made, left in zip(shapes, last, new, left_out, strict=True):
            encode, decode = _encoding(self._codec, shape)
            arrays, wanted = encode(old, made, left)
            sent.extend(arrays)
            read.append(decode(made, arrays, old, wanted))
        pieces, left_out = zip(*jax.block_until_ready(read), strict=True)
        return Difference(tuple(map(np.asarray, sent)), pieces, left_out)


@shared
def _applying(codec: str, shape: Shape) -> jax.stages.Compiled:
    """The program that applies an encoded difference to a tensor."""

    def apply(arrays: Tensors, anchor: jax.Array) -> jax.Array:
        return anchor - CODECS[codec].decode(arrays, shape)

    tensor, arrays = described(CODECS[codec], shape)
    return jax.jit(apply).lower(arrays, tensor).compile()


@shared
def _encoding(codec: str, shape: Shape) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
    """The programs that encode a tensor's step, and that make the next version of what is sent."""

    def encode(last: jax.Array, new: jax.Array, left_out: jax.Array) -> tuple[Tensors, jax.Array]:
        wanted = last - new + left_out
        return UPDATE_CODECS[codec].encode(wanted), wanted

    def read(
        spare: jax.Array, arrays: Tensors, last: jax.Array, wanted: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del spare
        step = UPDATE_CODECS[codec].decode(arrays, shape)
        return last - step, wanted - step

    tensor, arrays = described(UPDATE_CODECS[codec], shape)
    reading = jax.jit(read, donate_argnums=(0, 3), keep_unused=True)
    return (
        jax.jit(encode, donate_argnums=2).lower(tensor, tensor, tensor).compile(),
        reading.lower(tensor, arrays, tensor, tensor).compile(),
    )


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
