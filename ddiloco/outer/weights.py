"""The weight of a learner's contribution to a merge (paper, one synchronisation, step 5)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def contribution_weight(c_steps: int, c_tokens: int) -> float:
    """Quantity times tokens a step, `c_tokens * (c_tokens / c_steps)`; 0 without a step or a token.

    Args:
      c_steps: inner steps since the learner last received the fragment.
      c_tokens: tokens that these steps trained on.

    Raises:
      ValueError: a negative count.
    """
    if c_steps < 0 or c_tokens < 0:
        raise ValueError(f"c_steps is {c_steps} and c_tokens is {c_tokens}, but counts are not negative")
    return c_tokens * (c_tokens / c_steps) if c_steps else 0.0


def normalised(weights: Iterable[float]) -> np.ndarray:
    """The weights (M,) float32 divided by their sum; all zero if they all are.

    Raises:
      ValueError: a negative weight or one that is not finite.
    """
    exact = np.asarray(list(weights), np.float64)
    if not np.all(np.isfinite(exact) & (exact >= 0)):
        raise ValueError(f"weights are {exact.tolist()}, but must be finite and not negative")
    total = exact.sum()
    return (exact / total if total > 0 else exact).astype(np.float32)
