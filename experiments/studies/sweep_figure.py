"""The figure of a sweep: losses along the axis with a line for what else differs, or point by point."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from ddiloco.observe.figures import dress, figure_at
from experiments.studies import series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MANY = 6  # lines above which the legend stands below the panels
_LETTER = 0.06  # inches that a letter of a point's name takes
_WIDE = 8.0  # the largest over the smallest place from which on the axis is logarithmic


def draw(
    path: pathlib.Path, rows: Sequence[series.Row], axes: series.Axes, baseline: series.Row | None
) -> None:
    """Writes the figure: held-out loss and, where there are any, accuracy and the gap to the baseline."""
    frame = series.frame_of(rows, axes, baseline)
    frame["gap"] = [None if gap is None else 100 * gap for gap in frame["gap"]]
    panels = {"eval_loss": "held-out loss (nats/token)"}
    if series.values(frame, "eval_accuracy"):
        panels["eval_accuracy"] = "held-out accuracy"
    if baseline:
        name = ", ".join(str(value) for value in baseline.values()).replace("_", "-")
        panels["gap"] = f"loss above {name} (%)"
    lines = frame["line"].nunique()
    below = axes.x is not None and lines > _MANY
    height = 4.2 if axes.x else 1.4 + 0.34 * lines
    height += 0.2 * math.ceil(lines / len(panels)) if below else 0.0
    names = 0.0 if axes.x else _LETTER * max(map(len, frame["line"]), default=0)
    with figure_at(path, 1 + (5.2 + names) * len(panels), height, dpi=120) as figure:
        drawn = figure.subplots(1, len(panels), squeeze=False)[0]
        for panel, (name, title) in zip(drawn, panels.items(), strict=True):
            if axes.x:
                _draw_lines(panel, frame, name)
                panel.set_xlabel(axes.x)
                panel.set_ylabel(title)
                if axes.lines and not below and panel.get_legend_handles_labels()[0]:
                    legend = axes.lines[0] if len(axes.lines) == 1 else None
                    panel.legend(frameon=False, fontsize=8, title=legend, title_fontsize=8)
            else:
                _draw_points(panel, frame, name)
                panel.set_xlabel(title)
            dress(panel)
        if below:
            known = figure.axes[0].get_legend_handles_labels()
            figure.legend(*known, loc="outside lower center", ncols=len(panels), frameon=False, fontsize=7)


def _draw_lines(panel: Axes, frame: pd.DataFrame, figure: str) -> None:
    """A line for each name, with bars of one standard deviation; of one at a single place, a level."""
    places = [place for _, own in frame.groupby("line") if own["x"].nunique() > 1 for place in own["x"]]
    places, one_point = sorted(set(places)), len(frame[["line", "x"]].drop_duplicates()) == 1
    for i, (name, own) in enumerate(frame.groupby("line", sort=False)):
        known = [(x, *_spread(runs, figure)) for (_, x), runs in series.points(own) if _spread(runs, figure)]
        known = sorted(entry for entry in known if math.isfinite(entry[1]))
        if not known:
            continue
        x, mean, spread = zip(*known, strict=True)
        if own["x"].nunique() == 1 and not one_point:
            panel.axhline(mean[0], color=f"C{i % 10}", ls="--", lw=1.2, label=name)
        else:
            form = {"marker": "osD^v"[i // 10 % 5], "ms": 4, "capsize": 2}
            panel.errorbar(x, mean, yerr=spread, color=f"C{i % 10}", label=name, **form)
    if places and places[0] > 0 and places[-1] >= _WIDE * places[0]:
        panel.set_xscale("log", base=2)
    if 1 < len(places) <= 8:
        panel.set_xticks(places, [f"{place:g}" for place in places])
        panel.minorticks_off()


def _draw_points(panel: Axes, frame: pd.DataFrame, figure: str) -> None:
    """A row for each name, the best at the top."""
    known = [(line, _spread(runs, figure)) for (line, _), runs in series.points(frame)]
    known = sorted((entry for entry in known if entry[1]), key=lambda entry: -entry[1][0])
    for place, (_, (mean, spread)) in enumerate(known):
        panel.errorbar(mean, place, xerr=spread or None, color="C0", marker="o", ms=5, capsize=2)
    panel.set_yticks(range(len(known)), [name or "all" for name, _ in known], fontsize=8)
    panel.set_ylim(-0.6, max(len(known), frame["line"].nunique()) - 0.4)


def _spread(runs: pd.DataFrame, figure: str) -> tuple[float, float] | None:
    return series.mean_and_spread(series.values(runs, figure))
