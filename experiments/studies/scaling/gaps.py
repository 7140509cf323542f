"""How the gap to data-parallel training goes with parameters and with tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.studies.scaling.measurements import ScalingError


def trend(losses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The slopes of the gap by log N and by log D, each `(slope, standard error)`.

    Least squares over runs with several learners, with a constant for each number. The errors are a
    jackknife's, which leaves out one (N, D) after another: gaps at one share the loss they are held against.

    Args:
      losses: rows of `study.loss_rows`.

    Raises:
      ScalingError: there are no gaps, or with one (N, D) less they do not tell log N from log D.
    """
    rows = [row for row in losses if row["gap"] is not None and row["learners"] > 1]
    if not rows:
        raise ScalingError("needs runs with several learners, and of data-parallel beside them")
    slopes = _slopes(rows)
    places = sorted({(row["params"], row["tokens"]) for row in rows})
    left = [_slopes([row for row in rows if (row["params"], row["tokens"]) != place]) for place in places]
    errors = np.sqrt((len(places) - 1) * np.var(left, axis=0))
    by_params, by_tokens = np.stack([slopes, errors], axis=1).tolist()
    return {"learners": sorted({row["learners"] for row in rows}), "params": by_params, "tokens": by_tokens}


def _slopes(rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    learners = sorted({row["learners"] for row in rows})
    constants = [[float(row["learners"] == m) for m in learners] for row in rows]
    logs = [[np.log(row["params"]), np.log(row["tokens"])] for row in rows]
    matrix = np.hstack([np.array(logs) - np.mean(logs, axis=0), constants])
    # Tokens are whole batches: what follows from N does so to a few parts in a thousand.
    if np.linalg.matrix_rank(matrix, tol=0.1) < 2 + len(learners):
        raise ScalingError("needs more sizes, and tokens that do not follow from them")
    return np.linalg.lstsq(matrix, np.array([row["gap"] for row in rows]), rcond=None)[0][:2]
