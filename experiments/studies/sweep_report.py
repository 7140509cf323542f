"""The tables of a sweep: means over seeds with gaps to the baseline, and every run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.studies import runs, series
from experiments.studies.grid import Sweep

COLUMNS = (
    "eval_loss",
    "eval_accuracy",
    "train_loss",
    "mean_quorum",
    "num_params",
    "tokens_total",
    "tokens_per_second",
    "wall_seconds",
    "bytes_sent",
)


def report(rows: Sequence[Mapping[str, Any]], sweep: Sweep) -> str:
    """The tables: of means over seeds and gaps, where there are any, and of every run."""
    tables = [table(rows)]
    if sweep.baseline or len({row.get(series.SEED) for row in rows}) > 1:
        tables.insert(0, means_table(rows, sweep))
    return "\n\n".join(tables)


def means_table(rows: Sequence[Mapping[str, Any]], sweep: Sweep) -> str:
    """A Markdown table of each point's figures, mean ± standard deviation over seeds, in the sweep's order.

    Where there is a baseline, `gap` is how much higher the loss is than the baseline's, seed by seed; where
    there are several lengths of it, `same loss at` is the part of the tokens with which it has that loss.
    """
    axes = sweep.axes()
    points = series.groups(rows, axes)
    base = sweep.baseline
    matching = [series.tokens_to_match(point, rows, axes, base) if base else [] for point in points]
    matched = any(value != 1 for values in matching for value in values)
    measures = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    head = [
        *axes.lines,
        *([axes.x] if axes.x else []),
        "runs",
        *(["gap"] if base else []),
        *(["same loss at"] if matched else []),
        *measures,
    ]
    cells = []
    for group, match in zip(points, matching, strict=True):
        settings = [str(group.rows[0].get(name, "")) for name in head[: len(axes.lines) + bool(axes.x)]]
        gap = []
        if base:
            gap = [100 * value for value in series.gaps(group, rows, axes, base, "eval_loss")]
            gap = [_spread(gap, "+.2f", "%")]
        share = [_spread([100 * value for value in match], ".0f", "%")] if matched else []
        figures = [_spread(group.values(name)) for name in measures]
        cells.append([*settings, str(len(group.rows)), *gap, *share, *figures])
    return runs.markdown(head, cells)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Every run as a row of a Markdown table, best held-out loss first."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    names = [n for n in names if n not in COLUMNS or any(row.get(n) is not None for row in rows)]
    ordered = sorted(rows, key=_loss)
    return runs.markdown(names, [[_cell(row.get(name, "")) for name in names] for row in ordered])


def _spread(values: Sequence[float], form: str | None = None, sign: str = "") -> str:
    """Mean and, where they differ, standard deviation of a figure's values."""
    found = series.mean_and_spread(values)
    if found is None:
        return "-"
    mean, spread = found
    form = form or (",.0f" if abs(mean) >= 1000 else ".5g")
    text = f"{mean:{form}}{sign}"
    return f"{text} ± {spread:{form.removeprefix('+') if form != '.5g' else '.2g'}}{sign}" if spread else text


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _loss(row: Mapping[str, Any]) -> float:
    """A run's held-out loss; of one without arrays, which has none, infinity."""
    return math.inf if row["eval_loss"] is None else row["eval_loss"]
