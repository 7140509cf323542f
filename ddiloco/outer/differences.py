"""New versions as the syncer sends them: as their difference from the last one, in fewer bytes.

The version is what can be made of the difference, so that every learner has the same one to the bit; what the
codec left out is added to the next difference.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from ddiloco.outer.codecs import UPDATE_CODECS, Codec, Shape
from ddiloco.outer.encoding import described, differences
from ddiloco.outer.fragments import FragmentLayout

Arrays = tuple[jax.Array, ...]


class Difference(NamedTuple):
    """One step of a fragment from a version to the next."""

    arrays: tuple[np.ndarray, ...]  # what travels, as `wire_format` says of the codec
    # The next version, which a `FragmentDecoder` of the codec makes of the arrays and the last one
    pieces: Arrays
    left_out: Arrays  # what the codec left out, in the pieces' shapes


class DifferenceEncoder:
    """Encodes on the CPU; its only state is compiled code. Fragments of equal shapes share it.

    What travels is computed by one program, the version from it by another: within one, XLA might compute a
    code twice and round it in two ways.
    """

    def __init__(self, layout: FragmentLayout, codec: str) -> None:
        """Compiles nothing yet. `codec`: one of `UPDATE_CODECS`, not f32."""
        self._layout, self._codec = layout, UPDATE_CODECS[codec]
        self._programs = functools.cache(self._compiled)

    def compile(self, p: int) -> None:
        """Compiles for fragment p, unless it has been done for one of the same shapes."""
        self._programs(self._layout.piece_shapes(p))

    def __call__(
        self, p: int, last: Sequence[np.ndarray | jax.Array], new: Arrays, left_out: Arrays
    ) -> Difference:
        """Encodes a step of fragment p, and waits for the result.

        Args:
          last: the version before, numpy or on the CPU device.
          new: what the outer step made of it; its memory is taken.
          left_out: by earlier updates; its memory is taken.
        """
        encode, read = self._programs(self._layout.piece_shapes(p))
        arrays, wanted = encode(last, new, left_out)
        pieces, left = jax.block_until_ready(read(new, arrays, last, wanted))
        return Difference(tuple(map(np.asarray, arrays)), pieces, left)

    def _compiled(self, shapes: tuple[Shape, ...]) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
        pieces, arrays = described(self._codec, shapes, jax.local_devices(backend="cpu")[0])
        return (
            _encode.lower(self._codec, pieces, pieces, pieces).compile(),
            _read.lower(self._codec, pieces, arrays, pieces, pieces).compile(),
        )


# Jitted here and not in each DifferenceEncoder, so that JAX compiles them once for all of a process.


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _encode(codec: Codec, last: Arrays, new: Arrays, left_out: Arrays) -> tuple[Arrays, Arrays]:
    wanted = tuple(old - made + left for old, made, left in zip(last, new, left_out, strict=True))
    return tuple(array for value in wanted for array in codec.encode(value)), wanted


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 4), keep_unused=True)
def _read(codec: Codec, spare: Arrays, arrays: Arrays, last: Arrays, wanted: Arrays) -> tuple[Arrays, Arrays]:
    del spare
    steps = differences(codec, arrays, [old.shape for old in last])
    pieces = tuple(old - step for old, step in zip(last, steps, strict=True))
    return pieces, tuple(value - step for value, step in zip(wanted, steps, strict=True))
