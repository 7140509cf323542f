"""Directions of outer gradients, compared on a sample of their elements."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import numpy as np

SAMPLE = 1 << 13  # elements of a fragment on which cosines are measured
_LINE = 128  # neighbours that are read together, since each line that is touched may cost a page


def sampled_cosines(
    anchor: Sequence[np.ndarray], contributions: Collection[Sequence[np.ndarray]], norms: np.ndarray
) -> np.ndarray:
    """Cosines between outer gradients on a sample of their elements.

    Which elements depends on the bits of all norms. So it is the same in a replay, but no learner can know
    it in time to behave well there alone, since it does not know the others' norms.

    Args:
      anchor: Theta_p before the round, piece by piece.
      contributions: theta_{m,p} of M learners.
      norms: (pieces, M) of the outer gradients, float32.

    Returns:
      (M, M) cosines, NaN where an outer gradient is zero on the sample.
    """
    total = sum(piece.size for piece in anchor)
    seed = hashlib.sha256(np.asarray(norms, np.float32).tobytes()).digest()
    rng = np.random.default_rng(int.from_bytes(seed[:8], "little"))
    lines = [_lines(piece.size, total, rng) for piece in anchor]
    origin = _sampled(anchor, lines)
    deltas = origin - np.stack([_sampled(contribution, lines) for contribution in contributions])
    gram = deltas @ deltas.T
    lengths = np.sqrt(np.diag(gram))
    with np.errstate(divide="ignore", invalid="ignore"):
        cosines: np.ndarray = gram / np.outer(lengths, lengths)
    return cosines


def _lines(size: int, total: int, rng: np.random.Generator) -> np.ndarray | None:
    """Which lines of a piece are in the sample; None: all of the piece."""
    wanted = SAMPLE * size // (total * _LINE)
    return None if total <= SAMPLE or size < _LINE else rng.integers(0, size // _LINE, max(1, wanted))


def _sampled(pieces: Sequence[np.ndarray], lines: Sequence[np.ndarray | None]) -> np.ndarray:
    parts = []
    for piece, rows in zip(pieces, lines, strict=True):
        flat = np.asarray(piece).reshape(-1)
        whole = flat[: flat.size // _LINE * _LINE].reshape(-1, _LINE)
        parts.append(flat if rows is None else whole[rows].reshape(-1))
    return np.concatenate(parts).astype(np.float64)
