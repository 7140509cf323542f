"""Codecs: how the outer gradient of one tensor becomes fewer bytes, and what that costs in exactness.

A codec is a pair of pure functions for use under jit. The paper's result for such precisions: bfloat16 and
4 bits each cost 0.09% of loss, 2 bits 32%.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 128  # neighbours, in row-major order, that share a scale
SMALLEST_SCALE = 2.0**-120  # a block that would need a smaller one is sent as zeros

Shape = tuple[int, ...]


class ArrayFormat(NamedTuple):
    """Shape and dtype of an array as it travels."""

    shape: Shape
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Codec:
    """One way to write a float32 array of n elements; `decode` of `encode` is the array but for the error.

    With x the array, y what comes back, and L the largest |x| in the block of an element:
    |y - x| <= relative_error * L + absolute_error, for |x| up to 1e38. What is not finite makes at least its
    own element not finite in y, never a number; zeros stay zeros.

    Attributes:
      encode: (x float32 of any shape) -> arrays of `formats(x.shape)`.
      decode: (those arrays, shape) -> y float32 of the shape.
      formats: shape -> what `encode` makes of it; they alone say how many bytes travel.
      block: elements that share L; the last block of an array may be shorter. 1: each its own.
      relative_error: share of L.
      absolute_error: what becomes of numbers that are next to nothing.
      of_parameters: whether the parameters themselves are written, not their outer gradient.
    """

    encode: Callable[[jax.Array], tuple[jax.Array, ...]]
    decode: Callable[[Sequence[jax.Array], Shape], jax.Array]
    formats: Callable[[Shape], tuple[ArrayFormat, ...]]
    block: int = 1
    relative_error: float = 0.0
    absolute_error: float = 0.0
    of_parameters: bool = False

    def encoded_bytes(self, shape: Shape) -> int:
        """Bytes of an encoded array of this shape."""
        return sum(part.nbytes for part in self.formats(shape))


def _bf16_encode(x: jax.Array) -> tuple[jax.Array, ...]:
    # reduce_precision, since XLA may drop a conversion there and back and with it the rounding.
    rounded = jax.lax.reduce_precision(x.reshape(-1), exponent_bits=8, mantissa_bits=7)
    return (jax.lax.bitcast_convert_type(rounded.astype(jnp.bfloat16), jnp.uint16),)


def _bf16_decode(arrays: Sequence[jax.Array], shape: Shape) -> jax.Array:
    (bits,) = arrays
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32).reshape(shape)


def _bf16_formats(shape: Shape) -> tuple[ArrayFormat, ...]:
    return (ArrayFormat((math.prod(shape),), np.dtype(np.uint16)),)


def _quantised(x: jax.Array, largest_code: int) -> tuple[jax.Array, jax.Array]:
    """Scales (blocks,) float32 and codes (blocks, BLOCK) int8: each element to the nearest multiple.

    A block with an element that is not finite has the scale NaN.
    """
    flat = x.reshape(-1)
    blocks = jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
    finite = jnp.isfinite(blocks).all(axis=1)
    scales = jnp.abs(blocks).max(axis=1) / largest_code
    used = finite & (scales >= SMALLEST_SCALE)
    scales = jnp.where(used, scales, 0.0)
    multiples = jnp.round(blocks / jnp.where(used, scales, 1.0)[:, None])
    codes = jnp.where(used[:, None], jnp.clip(multiples, -largest_code, largest_code), 0.0)
    return jnp.where(finite, scales, jnp.nan), codes.astype(jnp.int8)


def _scaled(scales: jax.Array, codes: jax.Array, shape: Shape) -> jax.Array:
    values = codes.astype(jnp.float32) * scales[:, None]
    return values.reshape(-1)[: math.prod(shape)].reshape(shape)


def _int8_encode(x: jax.Array) -> tuple[jax.Array, ...]:
    scales, codes = _quantised(x, 127)
    return scales, codes.reshape(-1)[: x.size]


def _int8_decode(arrays: Sequence[jax.Array], shape: Shape) -> jax.Array:
    scales, codes = arrays
    codes = jnp.pad(codes, (0, -codes.size % BLOCK)).reshape(-1, BLOCK)
    return _scaled(scales, codes, shape)


def _int8_formats(shape: Shape) -> tuple[ArrayFormat, ...]:
    size = math.prod(shape)
    return ArrayFormat((-(-size // BLOCK),), np.dtype(np.float32)), ArrayFormat((size,), np.dtype(np.int8))


def _int4_encode(x: jax.Array) -> tuple[jax.Array, ...]:
    """Packs element i of a block with element i + BLOCK/2: whole rows of bytes, which vector units like."""
    scales, codes = _quantised(x, 7)
    nibbles = codes.astype(jnp.uint8) & 15
    packed = nibbles[:, : BLOCK // 2] | (nibbles[:, BLOCK // 2 :] << 4)
    return scales, packed.reshape(-1)[: _packed_size(x.size)]


def _int4_decode(arrays: Sequence[jax.Array], shape: Shape) -> jax.Array:
    scales, packed = arrays
    packed = jnp.pad(packed, (0, -packed.size % (BLOCK // 2))).reshape(-1, BLOCK // 2)
    nibbles = jnp.concatenate([packed & 15, packed >> 4], axis=1).astype(jnp.int8)
    return _scaled(scales, jnp.where(nibbles > 7, nibbles - 16, nibbles), shape)


def _int4_formats(shape: Shape) -> tuple[ArrayFormat, ...]:
    size = math.prod(shape)
    scales = ArrayFormat((-(-size // BLOCK),), np.dtype(np.float32))
    return scales, ArrayFormat((_packed_size(size),), np.dtype(np.uint8))


def _packed_size(size: int) -> int:
    """Bytes of packed codes: of a last block shorter than half, one for each element."""
    whole, rest = divmod(size, BLOCK)
    return whole * (BLOCK // 2) + min(rest, BLOCK // 2)


def _f32_formats(shape: Shape) -> tuple[ArrayFormat, ...]:
    return (ArrayFormat(shape, np.dtype(np.float32)),)


# Beside half a scale, int8 and int4 lose what float32 loses in dividing by the scale and multiplying again.
_FLOAT32_SHARE = 2.0**-20

CODECS: dict[str, Codec] = {
    "f32": Codec(lambda x: (x,), lambda arrays, shape: arrays[0], _f32_formats, of_parameters=True),
    "bf16": Codec(
        _bf16_encode, _bf16_decode, _bf16_formats, relative_error=2.0**-8, absolute_error=2.0**-126
    ),
    "int8": Codec(
        _int8_encode,
        _int8_decode,
        _int8_formats,
        block=BLOCK,
        relative_error=1 / 254 + _FLOAT32_SHARE,
        absolute_error=127 * SMALLEST_SCALE,
    ),
    "int4": Codec(
        _int4_encode,
        _int4_decode,
        _int4_formats,
        block=BLOCK,
        relative_error=1 / 14 + _FLOAT32_SHARE,
        absolute_error=7 * SMALLEST_SCALE,
    ),
}
