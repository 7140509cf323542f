"""Fragments as learners send them: encoded on a learner's devices, decoded on the syncer's CPU.

With the codec f32 a learner sends its parameters theta_{m,p}; with any other, its outer gradient
Theta_p(version) - theta_{m,p}, piece by piece. The syncer decodes against its current version of the fragment
alone: what a learner computed from an older one decodes to nonsense, and the syncer's core drops it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ddiloco.outer.codecs import CODECS, ArrayFormat, Codec, Shape
from ddiloco.outer.fragments import FragmentLayout
from ddiloco.outer.host_memory import aligned
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.outer.sharded_encoding import encode_sharded

Arrays = Sequence[Any]


class InvalidContribution(ValueError):
    """What a learner sent cannot be merged; the message says what is wrong with it."""


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
    offer: tuple[int, ...]  # to the syncer
    difference: tuple[int, ...]  # to a learner that has the version before


def traffic(layout: FragmentLayout, config: OuterConfig) -> Traffic:
    """What fragments take on the wire under these settings."""
    by_codec = (encoded_bytes(layout, codec) for codec in ("f32", config.codec, config.update_codec))
    return Traffic(*by_codec)


def encode(
    codec: Codec,
    pieces: Arrays,
    anchor: Arrays,
    residual: Arrays = (),
    shardings: Sequence[NamedSharding | None] | None = None,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Encodes the outer gradient of a fragment; pure, for use under jit.

    Args:
      codec: one of outer gradients, not `of_parameters`.
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


def differences(codec: Codec, arrays: Arrays, shapes: Sequence[Shape]) -> tuple[jax.Array, ...]:
    """What `encode` made the arrays of, piece by piece; pure, for use under jit."""
    left = iter(arrays)
    return tuple(codec.decode([next(left) for _ in codec.formats(shape)], shape) for shape in shapes)


class FragmentDecoder:
    """Decodes what learners sent, on the CPU; for any number of threads at a time once compiled."""

    def __init__(self, layout: FragmentLayout, codec: str) -> None:
        """Compiles nothing yet."""
        self._layout = layout
        self._name, self._codec = codec, CODECS[codec]
        self._device = jax.local_devices(backend="cpu")[0]
        self._reading = functools.cache(self._compiled)

    def compile(self, fragments: Sequence[int] | None = None) -> None:
        """Compiles for these fragments, None: for all, so that no round waits for it."""
        if not self._codec.of_parameters:
            for p in range(self._layout.num_fragments) if fragments is None else fragments:
                self._reading(self._layout.piece_shapes(p))

    def __call__(self, p: int, arrays: Sequence[np.ndarray], anchor: Sequence[np.ndarray]) -> Sequence[Any]:
        """The pieces theta_{m,p}, float32, whose values are still to be validated.

        They have the codec's error and float32's own, at most 2^-24 of the parameter. With f32 they are the
        arrays.

        Args:
          arrays: what came, which may be anything.
          anchor: Theta_p(version), float32.

        Raises:
          InvalidContribution: the arrays are not those of `wire_format`; raised before decoding takes memory.
        """
        expected = wire_format(self._layout, p, self._name)
        if len(arrays) != len(expected):
            raise InvalidContribution(
                f"fragment {p} in {self._name} has {len(expected)} arrays, but {len(arrays)} came"
            )
        for i, (array, (shape, dtype)) in enumerate(zip(arrays, expected, strict=True)):
            if array.dtype != dtype or tuple(array.shape) != shape:
                raise InvalidContribution(
                    f"array {i} of fragment {p} in {self._name} is {array.dtype}{list(array.shape)}, "
                    f"but must be {dtype}{list(shape)}"
                )
        if self._codec.of_parameters:
            return arrays
        given = [tuple(aligned(np.asarray(x)) for x in group) for group in (arrays, anchor)]
        pieces = self._reading(self._layout.piece_shapes(p))(*given)
        return tuple(np.asarray(piece) for piece in pieces)

    def _compiled(self, shapes: tuple[Shape, ...]) -> jax.stages.Compiled:
        pieces, arrays = described(self._codec, shapes, self._device)
        return _read.lower(self._codec, arrays, pieces).compile()


def described(
    codec: Codec, shapes: Sequence[Shape], device: jax.Device
) -> tuple[tuple[jax.ShapeDtypeStruct, ...], tuple[jax.ShapeDtypeStruct, ...]]:
    """Float32 pieces of these shapes on the device, and the arrays that the codec makes of them."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    pieces = [(shape, jnp.float32) for shape in shapes]
    arrays = [part for shape in shapes for part in codec.formats(shape)]
    made, encoded = (
        tuple(jax.ShapeDtypeStruct(*part, sharding=sharding) for part in parts) for parts in (pieces, arrays)
    )
    return made, encoded


# Jitted here and not in each FragmentDecoder, so that JAX compiles it once for all of a process.
@functools.partial(jax.jit, static_argnums=0)
def _read(codec: Codec, arrays: Arrays, anchor: Arrays) -> tuple[jax.Array, ...]:
    steps = differences(codec, arrays, [origin.shape for origin in anchor])
    return tuple(origin - step for origin, step in zip(anchor, steps, strict=True))
