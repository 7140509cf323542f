"""The tables of a sweep: means over seeds with gaps to the baseline, and every run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.cli.tables import markdown
from experiments.studies import series
from experiments.studies.grid import Sweep

COLUMNS = (
    "eval_loss",
    "eval_accuracy",
    "train_loss",
    "rounds",
    "mean_quorum",
    "merged_share",
    "goodput",
    "left_out",
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
    axes = series.axes_of(sweep.points)
    rows = series.placed(rows, axes, sweep.baseline, sweep.points)
    figures = [name for name in COLUMNS if series.values(rows, name)]
    shares = [("gap", "+.2f", "gap")] if sweep.baseline else []
    if any(match != 1 for match in series.values(rows, "match")):
        shares.append(("match", ".0f", "same loss at"))
    cells = [
        [
            *(str(runs[0].get(name, "")) for name in axes.settings),
            str(len(runs)),
            *(_spread([100 * x for x in series.values(runs, name)], form, "%") for name, form, _ in shares),
            *(_spread(series.values(runs, name)) for name in figures),
        ]
        for runs in series.points(rows).values()
    ]
    return markdown([*axes.settings, "runs", *(title for *_, title in shares), *figures], cells)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Every run as a row of a Markdown table, best held-out loss first."""
    settings = dict.fromkeys(name for row in rows for name in row if name not in COLUMNS)
    names = [*settings, *(name for name in COLUMNS if any(row.get(name) is not None for row in rows))]
    ordered = sorted(rows, key=lambda row: math.inf if row["eval_loss"] is None else row["eval_loss"])
    return markdown(names, [[_cell(row.get(name, "")) for name in names] for row in ordered])


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
