"""Fragments as learners send them: encoded on their devices, read against the version that they anchor on.

But for f32, what travels is the outer gradient Theta_p(version) - theta_{m,p}, piece by piece. One version of
a fragment is all that the syncer needs to read it: its core accepts only contributions that anchor on the
current one, so that what was read against another is dropped whatever it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddiloco.outer.codecs import CODECS, ArrayFormat, Codec
from ddiloco.outer.fragments import FragmentLayout
from ddiloco.outer.host_memory import aligned

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


def encode(
    codec: Codec, pieces: Arrays, anchor: Arrays, residual: Arrays = ()
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Encodes the outer gradient of a fragment; pure, for use under jit.

    Args:
      codec: not one `of_parameters`.
      pieces: theta_{m,p}, float32.
      anchor: Theta_p(version) that the learner adopted, like `pieces`.
      residual: what earlier encodings left out, like `pieces`, to be sent along; (): no error feedback.

    Returns:
      The arrays of `wire_format`, and what this encoding leaves out, like `residual`. A piece that the syncer
      will refuse as unsound leaves nothing, or a NaN would come back in every encoding after it.
    """
    arrays: list[jax.Array] = []
    left: list[jax.Array] = []
    for i, (piece, origin) in enumerate(zip(pieces, anchor, strict=True)):
        value = origin - piece
        if residual:
            value = value + residual[i]
        encoded = codec.encode(value)
        arrays.extend(encoded)
        if residual:
            sound = jnp.isfinite(jnp.sum(jnp.square(value)))
            left.append(jnp.where(sound, value - codec.decode(encoded, value.shape), 0.0))
    return tuple(arrays), tuple(left)


class FragmentDecoder:
    """Reads what learners sent, on the CPU; for any number of threads once compiled."""

    def __init__(self, layout: FragmentLayout, codec: str, device: jax.Device | None = None) -> None:
        """Nothing is compiled yet. `device`: CPU device to compute on; the first one by default."""
        self._layout = layout
        self._name, self._codec = codec, CODECS[codec]
        self._device = device or jax.local_devices(backend="cpu")[0]
        self._executables: dict[tuple[tuple[int, ...], ...], jax.stages.Compiled] = {}

    def compile(self) -> None:
        """Compiles for all fragments, so that no round has to wait for it."""
        if not self._codec.of_parameters:
            for p in range(self._layout.num_fragments):
                self._executable(p)

    def __call__(self, p: int, arrays: Sequence[np.ndarray], anchor: Sequence[np.ndarray]) -> Sequence[Any]:
        """The pieces theta_{m,p} that the arrays stand for; their values have still to be validated.

        Beside the codec's error they have float32's own, at most 2^-24 of the parameter. f32's are given back
        as they are, unchecked.

        Args:
          p: the fragment.
          arrays: what came, of which nothing is known.
          anchor: Theta_p(version), float32.

        Raises:
          InvalidContribution: other arrays than `wire_format` says; before any memory is taken for them.
        """
        if self._codec.of_parameters:
            return arrays
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
        placed = [
            tuple(jax.device_put(aligned(np.asarray(x)), self._device) for x in group)
            for group in (anchor, arrays)
        ]
        pieces = jax.block_until_ready(self._executable(p)(*placed))
        return tuple(np.asarray(piece) for piece in pieces)

    def _executable(self, p: int) -> jax.stages.Compiled:
        shapes = self._layout.piece_shapes(p)
        if shapes not in self._executables:
            sharding = jax.sharding.SingleDeviceSharding(self._device)
            pieces = tuple(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for shape in shapes)
            arrays = tuple(
                jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
                for shape, dtype in wire_format(self._layout, p, self._name)
            )
            self._executables[shapes] = jax.jit(self._read).lower(pieces, arrays).compile()
        return self._executables[shapes]

    def _read(self, anchor: tuple[jax.Array, ...], arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        left = iter(arrays)
        pieces = []
        for origin in anchor:
            parts = [next(left) for _ in self._codec.formats(origin.shape)]
            pieces.append(origin - self._codec.decode(parts, origin.shape))
        return tuple(pieces)
