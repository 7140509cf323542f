"""Turns device scalars into floats, and floats into what JSON can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np


def as_float(value: Any) -> float:
    """The value of a Python number, NumPy scalar or complete device scalar of shape ()."""
    return float(value) if isinstance(value, float | int) else float(np.asarray(value))


def was_skipped(metrics: Mapping[str, Any]) -> bool:
    """Whether a step with these metrics changed nothing, as its loss or gradient was not finite."""
    return "skipped" in metrics and as_float(metrics["skipped"]) > 0


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The entries that are single numbers, as floats; names, lists and arrays are left out."""
    kept = {}
    for name, value in values.items():
        if value is None or isinstance(value, str | Mapping | list | tuple | Set):
            continue
        array = np.asarray(value)
        if array.ndim == 0:
            kept[name] = float(array)
    return kept


def as_json(value: Any) -> Any:
    """The value with keys as strings, device scalars as numbers, and NaN and infinities as None.

    What JSON does not know becomes its text.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, Sequence | Set):
        return [as_json(item) for item in value]
    if not isinstance(value, float):
        array = np.asarray(value)
        return str(value) if array.dtype.hasobject else as_json(array.tolist())
    return value if math.isfinite(value) else None
