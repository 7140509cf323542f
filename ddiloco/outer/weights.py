"""The weight of a learner's contribution to a merge (paper, one synchronisation, step 5)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def contribution_weight(c_steps: int, c_tokens: int) -> float:
    """How much a learner's contribution counts: its tokens times its tokens a step.

      w_m = c_tokens * (c_tokens / c_steps),  0 without a step or a token.

    Args:
      c_steps: inner steps since the learner last received the fragment.
      c_tokens: tokens that these steps trained on.

    Raises:
      ValueError: a negative count.

    Example:
      >>> contribution_weight(c_steps=10, c_tokens=1000), contribution_weight(c_steps=5, c_tokens=1000)
      (100000.0, 200000.0)
    """
    if c_steps < 0 or c_tokens < 0:
        raise ValueError(f"c_steps is {c_steps} and c_tokens is {c_tokens}, but counts are not negative")
    return c_tokens * (c_tokens / c_steps) if c_steps else 0.0


def normalised(weights: Iterable[float]) -> np.ndarray:
    """The weights divided by their sum, (M,) float32; all zero if they all are.

    Raises:
      ValueError: a negative weight or one that is not finite.

    Example:
      >>> print(normalised([1, 3, 0]))
      [0.25 0.75 0.  ]
    """
    exact = np.asarray(list(weights), np.float64)
    if not np.all(np.isfinite(exact) & (exact >= 0)):
        raise ValueError(f"weights are {exact.tolist()}, but must be finite and not negative")
    total = exact.sum()
    return (exact / total if total > 0 else exact).astype(np.float32)
