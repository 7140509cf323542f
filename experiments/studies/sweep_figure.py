"""The figure of a sweep: losses along the axis with a line for what else differs, or point by point."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddiloco.telemetry.plots import dress, figure_at
from experiments.studies import series
from experiments.studies.grid import Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MANY = 6  # lines above which the legend stands below the panels
_LETTER = 0.06  # inches that a letter of a point's name takes
_WIDE = 8.0  # the largest over the smallest place from which on the axis is logarithmic


def draw(path: pathlib.Path, rows: Sequence[series.Row], sweep: Sweep) -> None:
    """Writes the figure: held-out loss and, where there are any, accuracy and the gap to the baseline."""
    axes, baseline = series.axes_of(sweep.points), sweep.baseline
    runs = series.placed(rows, axes, baseline, sweep.points)
    runs = [{**run, "gap": None if run["gap"] is None else 100 * run["gap"]} for run in runs]
    panels = {"eval_loss": "held-out loss (nats/token)"}
    if series.values(runs, "eval_accuracy"):
        panels["eval_accuracy"] = "held-out accuracy"
    if baseline:
        name = ", ".join(str(value) for value in baseline.values()).replace("_", "-")
        panels["gap"] = f"loss above {name} (%)"
    lines = len({run["line"] for run in runs})
    below = axes.x is not None and lines > _MANY
    height = 4.2 if axes.x else 1.4 + 0.34 * lines
    height += 0.2 * math.ceil(lines / len(panels)) if below else 0.0
    names = 0.0 if axes.x else _LETTER * max((len(run["line"]) for run in runs), default=0)
    with figure_at(path, 1 + (5.2 + names) * len(panels), height, dpi=120) as figure:
        drawn = figure.subplots(1, len(panels), squeeze=False)[0]
        for panel, (name, title) in zip(drawn, panels.items(), strict=True):
            if not series.values(runs, name):
                panel.text(0.5, 0.5, "no run has one", transform=panel.transAxes, ha="center", color="0.5")
            if axes.x:
                _draw_lines(panel, runs, name)
                panel.set_xlabel(axes.x)
                panel.set_ylabel(title)
                if axes.lines and not below and panel.get_legend_handles_labels()[0]:
                    legend = axes.lines[0] if len(axes.lines) == 1 else None
                    panel.legend(frameon=False, fontsize=8, title=legend, title_fontsize=8)
            else:
                _draw_points(panel, runs, name)
                panel.set_xlabel(title)
            dress(panel)
        if below:
            known = figure.axes[0].get_legend_handles_labels()
            figure.legend(*known, loc="outside lower center", ncols=len(panels), frameon=False, fontsize=7)


def _draw_lines(panel: Axes, runs: Sequence[series.Row], figure: str) -> None:
    """A line for each name, with bars of one standard deviation; of one at a single place, a level."""
    by_line: dict[str, dict[float, tuple[float, float] | None]] = {}
    for (name, place), own in series.points(runs).items():
        by_line.setdefault(name, {})[place] = _spread(own, figure)
    places = sorted({place for own in by_line.values() if len(own) > 1 for place in own})
    one_point = len(series.points(runs)) == 1
    for i, (name, own) in enumerate(by_line.items()):
        known = sorted((x, *found) for x, found in own.items() if found)
        if not known:
            continue
        x, mean, spread = zip(*known, strict=True)
        if len(own) == 1 and not one_point:
            panel.axhline(mean[0], color=f"C{i % 10}", ls="--", lw=1.2, label=name)
        else:
            form = {"marker": "osD^v"[i // 10 % 5], "ms": 4, "capsize": 2}
            panel.errorbar(x, mean, yerr=spread, color=f"C{i % 10}", label=name, **form)
    if places and places[0] > 0 and places[-1] >= _WIDE * places[0]:
        panel.set_xscale("log", base=2)
    if 1 < len(places) <= 8:
        panel.set_xticks(places, [f"{place:g}" for place in places])
        panel.minorticks_off()


def _draw_points(panel: Axes, runs: Sequence[series.Row], figure: str) -> None:
    """A row for each name, the best at the top."""
    known = [(line, _spread(own, figure)) for (line, _), own in series.points(runs).items()]
    known = sorted((entry for entry in known if entry[1]), key=lambda entry: -entry[1][0])
    for place, (_, (mean, spread)) in enumerate(known):
        panel.errorbar(mean, place, xerr=spread or None, color="C0", marker="o", ms=5, capsize=2)
    panel.set_yticks(range(len(known)), [name or "all" for name, _ in known], fontsize=8)
    panel.set_ylim(-0.6, max(len(known), len({run["line"] for run in runs})) - 0.4)


def _spread(runs: Sequence[series.Row], figure: str) -> tuple[float, float] | None:
    return series.mean_and_spread(series.values(runs, figure))
