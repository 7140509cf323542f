"""Codecs: how the outer gradient of one tensor becomes fewer bytes, and what that costs in exactness.

A codec is a pair of pure functions for use under jit. The paper's result for such precisions: bfloat16 and
4 bits each cost 0.09% of loss, 2 bits 32%.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
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
    """One way to write a float32 array x in fewer bytes, and to read it back as y.

    The error of each element is bounded by the largest magnitude L in its block:

      |y - x| <= relative_error * L + absolute_error,  for |x| <= 1e38.

    Zeros stay zeros. An element that is not finite comes back not finite.

    Attributes:
      encode: x, float32 of any shape -> the arrays that travel.
      decode: (those arrays, the shape of x) -> y, float32.
      block: consecutive elements that share L; the last block of an array may be shorter. 1: no sharing.
      relative_error: the share of L in the bound.
      absolute_error: the bound where L is close to zero.
      of_parameters: whether the parameters themselves are written instead of their outer gradient.

    Example:
      >>> import jax.numpy as jnp
      >>> codec = CODECS["int8"]
      >>> x = jnp.array([1.0, -0.5, 0.002, 0.0])
      >>> scales, codes = codec.encode(x)
      >>> print(codes)
      [127 -64   0   0]
      >>> print(codec.decode((scales, codes), x.shape).round(3))
      [ 1.    -0.504  0.     0.   ]
      >>> [part.nbytes for part in codec.formats((1024, 1024))]
      [32768, 1048576]
    """

    encode: Callable[[jax.Array], tuple[jax.Array, ...]]
    decode: Callable[[Sequence[jax.Array], Shape], jax.Array]
    block: int = 1
    relative_error: float = 0.0
    absolute_error: float = 0.0
    of_parameters: bool = False

    def formats(self, shape: Shape) -> tuple[ArrayFormat, ...]:
        """Shapes and dtypes of what `encode` makes of an array of this shape."""
        return _formats(self.encode, shape)


@functools.cache
def _formats(encode: Callable[[jax.Array], tuple[jax.Array, ...]], shape: Shape) -> tuple[ArrayFormat, ...]:
    encoded = jax.eval_shape(encode, jax.ShapeDtypeStruct(shape, jnp.float32))
    return tuple(ArrayFormat(part.shape, np.dtype(part.dtype)) for part in encoded)


def _bf16_encode(x: jax.Array) -> tuple[jax.Array, ...]:
    # reduce_precision, since XLA may drop a conversion there and back and with it the rounding.
    rounded = jax.lax.reduce_precision(x.reshape(-1), exponent_bits=8, mantissa_bits=7)
    return (jax.lax.bitcast_convert_type(rounded.astype(jnp.bfloat16), jnp.uint16),)


def _bf16_decode(arrays: Sequence[jax.Array], shape: Shape) -> jax.Array:
    (bits,) = arrays
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32).reshape(shape)


def _quantised(x: jax.Array, largest_code: int, powers: bool) -> tuple[jax.Array, jax.Array]:
    """Scales (blocks,) float32 and codes (blocks, BLOCK) int8: each element as the nearest multiple.

    A block with an element that is not finite has the scale NaN. `powers`: scales are powers of two, the
    next ones above.
    """
    flat = x.reshape(-1)
    blocks = jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
    finite = jnp.isfinite(blocks).all(axis=1)
    scales = jnp.abs(blocks).max(axis=1) / largest_code
    used = finite & (scales >= SMALLEST_SCALE)
    if powers:
        mantissas, exponents = jnp.frexp(jnp.where(used, scales, 1.0))
        scales = jnp.ldexp(jnp.where(mantissas > 0.5, 1.0, 0.5), exponents)
    scales = jnp.where(used, scales, 0.0)
    multiples = jnp.round(blocks / jnp.where(used, scales, 1.0)[:, None])
    codes = jnp.where(used[:, None], jnp.clip(multiples, -largest_code, largest_code), 0.0)
    return jnp.where(finite, scales, jnp.nan), codes.astype(jnp.int8)


def _scaled(scales: jax.Array, codes: jax.Array, shape: Shape) -> jax.Array:
    values = codes.astype(jnp.float32) * scales[:, None]
    return values.reshape(-1)[: math.prod(shape)].reshape(shape)


def _int8_encode(x: jax.Array, powers: bool = False) -> tuple[jax.Array, ...]:
    scales, codes = _quantised(x, 127, powers)
    return scales, codes.reshape(-1)[: x.size]


def _int8_decode(arrays: Sequence[jax.Array], shape: Shape) -> jax.Array:
    scales, codes = arrays
    codes = jnp.pad(codes, (0, -codes.size % BLOCK)).reshape(-1, BLOCK)
    return _scaled(scales, codes, shape)


def _int4_encode(x: jax.Array, powers: bool = False) -> tuple[jax.Array, ...]:
    """Packs element i of a block with element i + BLOCK/2: whole rows of bytes, which vector units like."""
    scales, codes = _quantised(x, 7, powers)
    nibbles = codes.astype(jnp.uint8) & 15
    packed = nibbles[:, : BLOCK // 2] | (nibbles[:, BLOCK // 2 :] << 4)
    # Of a last block shorter than half, a byte for each element.
    whole, rest = divmod(x.size, BLOCK)
    return scales, packed.reshape(-1)[: whole * (BLOCK // 2) + min(rest, BLOCK // 2)]


def _int4_decode(arrays: Sequence[jax.Array], shape: Shape) -> jax.Array:
    scales, packed = arrays
    packed = jnp.pad(packed, (0, -packed.size % (BLOCK // 2))).reshape(-1, BLOCK // 2)
    nibbles = jnp.concatenate([packed & 15, packed >> 4], axis=1).astype(jnp.int8)
    return _scaled(scales, jnp.where(nibbles > 7, nibbles - 16, nibbles), shape)


# Beside half a scale, int8 and int4 lose what float32 loses in dividing by the scale and multiplying again.
_FLOAT32_SHARE = 2.0**-20

CODECS: dict[str, Codec] = {
    "f32": Codec(lambda x: (x,), lambda arrays, shape: arrays[0], of_parameters=True),
    "bf16": Codec(_bf16_encode, _bf16_decode, relative_error=2.0**-8, absolute_error=2.0**-126),
    "int8": Codec(
        _int8_encode,
        _int8_decode,
        block=BLOCK,
        relative_error=1 / 254 + _FLOAT32_SHARE,
        absolute_error=127 * SMALLEST_SCALE,
    ),
    "int4": Codec(
        _int4_encode,
        _int4_decode,
        block=BLOCK,
        relative_error=1 / 14 + _FLOAT32_SHARE,
        absolute_error=7 * SMALLEST_SCALE,
    ),
}


UPDATE_CODECS: Mapping[str, Codec] = {
    "f32": CODECS["f32"],
    "bf16": CODECS["bf16"],
    **{
        name: dataclasses.replace(
            CODECS[name], encode=functools.partial(encode, powers=True), relative_error=share
        )
        for name, encode, share in (("int8", _int8_encode, 1 / 127), ("int4", _int4_encode, 1 / 7))
    },
}
"""Those in which the syncer sends new versions: all that read them must come to the same bits.

A product of a code and a power of two is exact, so that it makes no difference whether a processor rounds it
before it is subtracted. `CODECS` of the same names have the same formats and read them.
"""
