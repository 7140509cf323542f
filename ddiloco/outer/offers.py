"""Offers as the syncer holds them: encoded, with the norms that were measured once as they came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ddiloco.arrays.host_memory import aligned
from ddiloco.outer.codecs import CODECS, GROUP, Shape
from ddiloco.outer.encoding import by_piece
from ddiloco.outer.guards import LINE
from ddiloco.outer.programs import described, shared

assert LINE == GROUP, "a sample has whole groups"


class MeasuredOffer(NamedTuple):
    """A learner's offer of a fragment."""

    codec: str
    arrays: tuple[np.ndarray, ...]  # in the codec's `wire_format`
    norms: np.ndarray  # of each piece of the outer gradient, float32
    # Theta_p from which that was taken, where the offer is the parameters; None: it is the outer gradient
    anchor: Any = None


class OfferSampler:
    """Decodes lines of offers, on which a guard measures cosines; its only state is compiled code."""

    def __init__(self, shapes: Sequence[Shape], counts: Sequence[int | None]) -> None:
        """`counts`: of each piece, as many lines as are drawn; None: the piece is taken whole."""
        self._shapes = shapes
        self._sampled: list[Shape] = [
            shape if count is None else (count * LINE,) for shape, count in zip(shapes, counts, strict=True)
        ]

    def compile(self, codec: str) -> None:
        """Compiles for offers in this codec, unless that was done."""
        if not CODECS[codec].exact:
            for shape in self._sampled:
                _decoding(codec, shape)

    def __call__(
        self, codec: str, arrays: Sequence[np.ndarray], lines: Sequence[np.ndarray | None]
    ) -> np.ndarray:
        """The elements in these lines of each piece, float64."""
        parts = [
            _rows(codec, shape, of_piece, rows)
            for shape, of_piece, rows in zip(
                self._shapes, by_piece(codec, self._shapes, arrays), lines, strict=True
            )
        ]
        if CODECS[codec].exact:
            pieces: Sequence[np.ndarray] = [part for (part,) in parts]
        else:
            pieces = [
                _decoding(codec, shape)(tuple(map(aligned, part)))
                for shape, part in zip(self._sampled, parts, strict=True)
            ]
        return np.concatenate([np.asarray(piece).reshape(-1) for piece in pieces]).astype(np.float64)


def _rows(
    codec: str, shape: Shape, arrays: Sequence[np.ndarray], lines: np.ndarray | None
) -> list[np.ndarray]:
    """The encoded arrays of these lines of a piece alone."""
    if lines is None:
        return list(arrays)
    of_line = CODECS[codec].formats((LINE,))
    whole = int(np.prod(shape)) // LINE
    found = []
    for array, (line, _) in zip(arrays, of_line, strict=True):
        flat = np.asarray(array).reshape(-1)[: whole * line[0]]
        found.append(flat.reshape(whole, line[0])[lines].reshape(-1))
    return found


@shared
def _decoding(codec: str, shape: Shape) -> jax.stages.Compiled:
    _, arrays = described(CODECS[codec], shape)
    return jax.jit(lambda given: CODECS[codec].decode(given, shape)).lower(arrays).compile()
