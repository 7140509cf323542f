"""Codecs: encodings of one tensor's outer gradient in fewer bytes, with their largest errors.

A codec is a pair of pure functions for use under jit. The paper's result for such precisions: bfloat16 and
4 bits each cost 0.09% of loss, 2 bits 32%, 1 bit 83%.
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

GROUP = 128  # neighbours, in row-major order, that share a scale
SMALLEST_SCALE = 2.0**-120  # a group that would need a smaller one is sent as zeros

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

    The error of each element is bounded by the largest magnitude L in its group:

      |y - x| <= relative_error * L + absolute_error,  for |x| <= 1e38.

    Zeros stay zeros, but for `sign`. An element that is not finite comes back not finite.

    Attributes:
      encode: x, float32 of any shape -> the arrays that travel.
      values: (those arrays, the elements of x) -> y, float32, in a shape that suits the codec; in row-major
        order zeros follow the elements.
      group: consecutive elements that share L; the last group of an array may be shorter. 1: no sharing.
      relative_error: the share of L in the bound.
      absolute_error: the bound where L is close to zero.
      exact: whether y is x.

    Example:
      >>> import jax.numpy as jnp
      >>> codec = CODECS["int8"]
      >>> x = jnp.array([1.0, -0.5, 0.002, 0.0])
      >>> scales, codes = codec.encode(x)
      >>> print(codes)
      [127 192   0   0]
      >>> print(codec.decode((scales, codes), x.shape).round(3))
      [ 1.    -0.504  0.     0.   ]
      >>> [part.nbytes for part in codec.formats((1024, 1024))]
      [32768, 1048576]
    """

    encode: Callable[[jax.Array], tuple[jax.Array, ...]]
    values: Callable[[Sequence[jax.Array], int], jax.Array]
    group: int = 1
    relative_error: float = 0.0
    absolute_error: float = 0.0
    exact: bool = False

    def decode(self, arrays: Sequence[jax.Array], shape: Shape) -> jax.Array:
        """What `encode` made the arrays of, but for its error: y, of the shape of x."""
        return shaped(self.values(arrays, math.prod(shape)), shape)

    def formats(self, shape: Shape) -> tuple[ArrayFormat, ...]:
        """Shapes and dtypes of what `encode` makes of an array of this shape."""
        return _formats(self.encode, shape)


def shaped(values: jax.Array, shape: Shape) -> jax.Array:
    """`Codec.values` in the shape of x."""
    return values.reshape(-1)[: math.prod(shape)].reshape(shape)


@functools.cache
def _formats(encode: Callable[[jax.Array], tuple[jax.Array, ...]], shape: Shape) -> tuple[ArrayFormat, ...]:
    encoded = jax.eval_shape(encode, jax.ShapeDtypeStruct(shape, jnp.float32))
    return tuple(ArrayFormat(part.shape, np.dtype(part.dtype)) for part in encoded)


def _bf16_encode(x: jax.Array) -> tuple[jax.Array, ...]:
    # reduce_precision, since XLA may drop a conversion there and back and with it the rounding.
    rounded = jax.lax.reduce_precision(x.reshape(-1), exponent_bits=8, mantissa_bits=7)
    return (jax.lax.bitcast_convert_type(rounded.astype(jnp.bfloat16), jnp.uint16),)


def _bf16_values(arrays: Sequence[jax.Array], size: int) -> jax.Array:
    (bits,) = arrays
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)


def _quantised(x: jax.Array, largest_code: int, powers: bool) -> tuple[jax.Array, jax.Array]:
    """Scales (groups,) float32 and codes (groups, GROUP) int8: each element as the nearest multiple.

    A group with an element that is not finite has the scale NaN. `powers`: scales are powers of two, the
    next ones above.
    """
    flat = x.reshape(-1)
    groups = jnp.pad(flat, (0, -flat.size % GROUP)).reshape(-1, GROUP)
    finite = jnp.isfinite(groups).all(axis=1)
    scales = jnp.abs(groups).max(axis=1) / largest_code
    used = finite & (scales >= SMALLEST_SCALE)
    if powers:
        mantissas, exponents = jnp.frexp(jnp.where(used, scales, 1.0))
        scales = jnp.ldexp(jnp.where(mantissas > 0.5, 1.0, 0.5), exponents)
    scales = jnp.where(used, scales, 0.0)
    multiples = jnp.round(groups / jnp.where(used, scales, 1.0)[:, None])
    codes = jnp.where(used[:, None], jnp.clip(multiples, -largest_code, largest_code), 0.0)
    return jnp.where(finite, scales, jnp.nan), codes.astype(jnp.int8)


def _packed(codes: jax.Array, bits: int, size: int) -> jax.Array:
    """Bytes with the lowest `bits` of each code (groups, GROUP), of which the first `size` count.

    A byte has elements of a group that lie a whole row of its bytes apart, which vector units like.
    """
    row = GROUP * bits // 8
    parts = jnp.split(codes.astype(jnp.uint8) & (2**bits - 1), 8 // bits, axis=1)
    packed = functools.reduce(jnp.bitwise_or, (part << (bits * i) for i, part in enumerate(parts)))
    # Of a last group shorter than a row, a byte for each element.
    whole, rest = divmod(size, GROUP)
    return packed.reshape(-1)[: whole * row + min(rest, row)]


def _unpacked(packed: jax.Array, bits: int) -> jax.Array:
    """What `_packed` has of each code, in its highest bits: (groups, codes of a byte, bytes of a row) int8.

    In this shape a program that adds up decoded arrays reads bytes where they are and stores no codes.
    """
    row = GROUP * bits // 8
    rows = jnp.pad(packed, (0, -packed.size % row)).reshape(-1, 1, row)
    shifts = np.arange(8 - bits, -1, -bits, dtype=np.uint8)[:, None]
    high = (rows << shifts) & np.uint8(256 - 2 ** (8 - bits))
    # Not `astype`: XLA for CPU takes uint8 to int8 to float32 for uint8 to float32 in some programs.
    return jax.lax.bitcast_convert_type(high, jnp.int8)


def _scaled(scales: jax.Array, codes: jax.Array, size: int) -> jax.Array:
    """Codes in the shape of `_unpacked` times their group's scale, zeros where `_packed` has no element."""
    if size % GROUP:  # what a sender has put there counts for nothing
        within = np.arange(GROUP).reshape(codes.shape[1:]) < size % GROUP
        whole = jnp.arange(len(codes)) < size // GROUP
        codes = jnp.where(whole[:, None, None] | within, codes, 0)
    return codes.astype(jnp.float32) * scales[:, None, None]


def _integers_encode(x: jax.Array, bits: int, powers: bool) -> tuple[jax.Array, ...]:
    scales, codes = _quantised(x, 2 ** (bits - 1) - 1, powers)
    return scales, _packed(codes, bits, x.size)


def _integers_values(arrays: Sequence[jax.Array], size: int, bits: int) -> jax.Array:
    scales, packed = arrays
    # Exact: SMALLEST_SCALE leaves room for six powers of two.
    return _scaled(scales * 2.0 ** (bits - 8), _unpacked(packed, bits), size)


def _signs_encode(x: jax.Array) -> tuple[jax.Array, ...]:
    """Each element as its sign, which an element that is not finite takes from its group."""
    flat = x.reshape(-1)
    rest = -flat.size % GROUP
    groups = jnp.pad(flat, (0, rest)).reshape(-1, GROUP)
    lengths = jnp.full(len(groups), GROUP).at[-1:].add(-rest)
    sums = jnp.abs(groups) / lengths[:, None]
    while sums.shape[1] > 1:  # in one order, so that shards of an array have the bits of the whole
        left, right = jnp.split(sums, 2, axis=1)
        sums = left + right
    scales = sums[:, 0]  # NaN or infinite where an element is
    return scales, _packed(groups < 0, 1, x.size)


def _signs_values(arrays: Sequence[jax.Array], size: int) -> jax.Array:
    scales, packed = arrays
    return _scaled(scales, 1 + 2 * (_unpacked(packed, 1) >> 7), size)


# Beside half a scale, codes lose what float32 loses in dividing by the scale and multiplying again.
_FLOAT32_SHARE = 2.0**-20


def _integers(bits: int, powers: bool = False) -> Codec:
    """Each element as a multiple of its group's scale, in so many bits; `powers` as in `_quantised`."""
    largest = 2 ** (bits - 1) - 1
    encode = functools.partial(_integers_encode, bits=bits, powers=powers)
    values = functools.partial(_integers_values, bits=bits)
    relative = 1 / largest if powers else 0.5 / largest + _FLOAT32_SHARE
    return Codec(encode, values, GROUP, relative, largest * SMALLEST_SCALE)


CODECS: dict[str, Codec] = {
    "f32": Codec(lambda x: (x,), lambda arrays, size: arrays[0], exact=True),
    "bf16": Codec(_bf16_encode, _bf16_values, relative_error=2.0**-8, absolute_error=2.0**-126),
    "int8": _integers(8),
    "int4": _integers(4),
    "int2": _integers(2),
    "sign": Codec(_signs_encode, _signs_values, GROUP, 1.0 + _FLOAT32_SHARE, 2.0**-126),
}


UPDATE_CODECS: Mapping[str, Codec] = {
    "f32": CODECS["f32"],
    "bf16": CODECS["bf16"],
    "int8": _integers(8, powers=True),
    "int4": _integers(4, powers=True),
}
"""Those in which the syncer sends new versions: all that read them must come to the same bits.

A product of a code and a power of two is exact, so that it makes no difference whether a processor rounds it
before it is subtracted. `CODECS` of the same names have the same formats and read them.
"""
