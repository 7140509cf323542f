"""How benchmarks measure: candidates in alternation, medians compared, a row for each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def row(
    name: str,
    measured: float,
    reference: float,
    limit: float,
    unit: str,
    *,
    ratio: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """One measurement, the thing it is held against, taken in the same run, and what cannot be passed.

    `ratio`: where it is taken pair by pair; None: measured / reference. `more`: further figures, each with a
    unit in its name or none at all.
    """
    ratio = measured / reference if ratio is None else ratio
    figures = {"ratio": ratio, "reference": reference, "measured": measured, "limit": limit}
    return {"name": name, **figures, "unit": unit, **more}


def alternated(
    measured: Callable[[], float], reference: Callable[[], float], pairs: int
) -> tuple[list[float], list[float]]:
    """What both say, so often each, turn about which goes first: a machine that changes favours neither."""
    ours: list[float] = []
    theirs: list[float] = []
    for pair in range(pairs):
        both = [(ours, measured), (theirs, reference)]
        for told, candidate in both if pair % 2 == 0 else reversed(both):
            told.append(candidate())
    return ours, theirs


def medians(
    candidates: Mapping[str, Callable[[], object]], repetitions: int, warm_up: int = 2
) -> dict[str, float]:
    """Seconds that each candidate takes until its arrays are ready, the median.

    They are taken in turn, so that a machine that slows down favours none; the first `warm_up` turns, which
    compile and find neither memory nor windows, do not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(warm_up + repetitions):
        for name, candidate in candidates.items():
            begun = time.perf_counter()
            jax.block_until_ready(candidate())
            seconds[name].append(time.perf_counter() - begun)
    return {name: statistics.median(taken[warm_up:]) for name, taken in seconds.items()}
