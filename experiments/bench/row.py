"""A row of a benchmark's table and file."""

from __future__ import annotations

from typing import Any


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

    Args:
      name: of the measurement.
      measured: in `unit`.
      reference: in `unit`.
      limit: in `unit`.
      unit: as readers know it.
      ratio: where it is taken pair by pair; None: measured / reference.
      **more: further figures, each with a unit in its name or none at all.
    """
    return {
        "name": name,
        "ratio": measured / reference if ratio is None else ratio,
        "reference": reference,
        "measured": measured,
        "limit": limit,
        "unit": unit,
        **more,
    }
