"""The figure of a comparison: scores by tokens, time and bytes, where the chips' time went, and how much."""

from __future__ import annotations

import functools
import pathlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddiloco.telemetry.plots import colours, dress, figure_at
from experiments.studies.comparison import clock_of, label_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]  # of `experiments.studies.comparison.digest`
Curve = list[tuple[float, float]]

_SKIPPED = 0.1  # share of a curve's start that may lie above the picture: the fall from the initial loss
_PLACES = 6  # across a line of panels, which has one, two or three
_MEASURES = {"loss": "held-out loss (nats/token)", "accuracy": "held-out accuracy"}


def draw(path: pathlib.Path, rows: Rows) -> None:
    """Writes the figure, with the panels that there are figures for."""
    lines = _panels(rows)
    width = 13 if any(len(line) > 1 for line in lines) else 8
    height = max(3.6, 1.4 + 0.42 * len(rows))
    with figure_at(path, width, max(1, len(lines)) * height, dpi=120) as figure:
        grid = figure.add_gridspec(max(1, len(lines)), _PLACES)
        for i, line in enumerate(lines):
            share = _PLACES // len(line)
            for j, panel in enumerate(line):
                panel(figure.add_subplot(grid[i, j * share : (j + 1) * share]))
        if not lines:
            figure.text(0.5, 0.5, "no run has finished", ha="center", color="0.5")


def _panels(rows: Rows) -> list[list[Callable[[Axes], None]]]:
    """The panels, line by line."""
    lines: list[list[Callable[[Axes], None]]] = []
    across = {"tokens": "tokens, all learners", "seconds": clock_of(rows), "bytes": "bytes over the links"}
    for y in _MEASURES:
        curves: list[Callable[[Axes], None]] = [
            functools.partial(_draw_curves, rows, y, x, title)
            for x, title in across.items()
            if any(_can_be_drawn(curve) for row in rows for curve in _curves(row, x, y))
        ]
        ends = any(_ends(row, y) for row in rows)
        lines.append(curves or [functools.partial(_draw_ends, rows, y)] * ends)
    lines.append([])
    if any(row["mean"]["goodput"] is not None for row in rows):
        lines[-1].append(functools.partial(_draw_shares, rows))
    if len(rows) > 1 and any(row["mean"]["time_ratio"] is not None for row in rows):
        lines[-1].append(functools.partial(_draw_times, rows))
    return [line for line in lines if line]


def _draw_curves(rows: Rows, y: str, x: str, title: str, axes: Axes) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, PercentFormatter

    tops = []
    for place, (row, colour) in enumerate(zip(rows, colours(len(rows)), strict=True)):
        curves = [curve for curve in _curves(row, x, y) if _can_be_drawn(curve)]
        if not curves:
            continue
        if len(curves) > 1:
            for curve in curves:
                axes.plot(*zip(*curve, strict=True), color=colour, lw=0.7, alpha=0.45)
        mean = mean_curve(curves)
        if not mean:
            continue
        width = max(1.8, 4.0 - 0.6 * place)  # of two curves that are one, both are seen
        axes.plot(*zip(*mean, strict=True), color=colour, lw=width, label=label_of(row))
        begin = mean[0][0] + _SKIPPED * (mean[-1][0] - mean[0][0])
        tops.append(max((height for place, height in mean if place >= begin), default=mean[-1][1]))
    if tops and y == "loss":
        lowest, highest = min(y for line in axes.lines for y in line.get_ydata()), max(tops)
        margin = 0.06 * (highest - lowest) or 0.1
        axes.set_ylim(lowest - margin, highest + margin)
    if x == "bytes":
        axes.set_xscale("log")  # algorithms are a factor of ten and more apart
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 30 * low else (1,)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if y == "accuracy":
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel(title)
    axes.set_ylabel(_MEASURES[y])
    if x == "tokens":
        axes.legend(frameon=False, fontsize=8)
    dress(axes)


def _draw_ends(rows: Rows, y: str, axes: Axes) -> None:
    """Each run's last score, a dot, and their mean, a line, where runs were scored at their ends only."""
    for place, (row, colour) in enumerate(zip(rows, colours(len(rows)), strict=True)):
        ends = _ends(row, y)
        if ends:
            axes.scatter(ends, [place] * len(ends), color=colour, alpha=0.6, s=30)
            axes.scatter([sum(ends) / len(ends)], [place], color=colour, marker="|", s=350, lw=2)
    axes.set_xlabel(f"{_MEASURES[y]} at the end")
    _name_bars(axes, rows)


def _draw_shares(rows: Rows, axes: Axes) -> None:
    from matplotlib import colormaps

    causes = dict.fromkeys(c for row in rows for c, share in row["lost"].items() if share >= 5e-4)
    of_cause = dict(zip(causes, colormaps["Set2"].colors, strict=False))
    for place, row in enumerate(rows):
        goodput = row["mean"]["goodput"]
        if goodput is None:
            continue
        axes.barh(place, 100 * goodput, color="0.35")
        axes.text(1, place, f"{goodput:.1%}", color="white", va="center", fontsize=8)
        left = 100 * goodput
        for cause in causes:
            share = 100 * row["lost"].get(cause, 0.0)
            axes.barh(place, share, left=left, color=of_cause[cause])
            left += share
    axes.barh(0, 0, color="0.35", label="goodput")
    for cause in causes:
        axes.barh(0, 0, color=of_cause[cause], label=cause.replace("_", " "))
    _mark_paper(axes, rows, "goodput", 100)
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the chips' time (%)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, fontsize=8)
    _name_bars(axes, rows)


def _draw_times(rows: Rows, axes: Axes) -> None:
    longest = max(row["mean"]["time_ratio"] or 0.0 for row in rows)
    for place, (row, colour) in enumerate(zip(rows, colours(len(rows)), strict=True)):
        ratio, spread = row["mean"]["time_ratio"], row["std"]["time_ratio"]
        if ratio is not None:
            axes.barh(place, ratio, xerr=spread, color=colour, ecolor="0.2", capsize=2)
            inside = ratio > 0.15 * longest
            left, ink = (0.0, "white") if inside else (ratio, "0.2")
            axes.text(left + 0.01 * longest, place, f"{ratio:.2f}", color=ink, va="center", fontsize=8)
    _mark_paper(axes, rows, "time_ratio", 1)
    axes.axvline(1, color="0.3", lw=0.8, ls=":")
    axes.set_xlim(left=0)
    first = rows[0]["label"]
    axes.set_xlabel(f"{clock_of(rows)} to the end, relative to {first}")
    if any("time_ratio" in row["paper"] for row in rows):
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=8)
    _name_bars(axes, rows)


def _mark_paper(axes: Axes, rows: Rows, name: str, scale: float) -> None:
    marks = [(scale * row["paper"][name], place) for place, row in enumerate(rows) if name in row["paper"]]
    if marks:
        looks = {"color": "white", "edgecolor": "black", "marker": "D", "s": 34, "zorder": 5}
        axes.scatter(*zip(*marks, strict=True), **looks, clip_on=False, label="the paper")


def _name_bars(axes: Axes, rows: Rows) -> None:
    axes.set_yticks(range(len(rows)), [textwrap.fill(label_of(row), 30) for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    dress(axes, "x")


def _curves(row: Mapping[str, Any], x: str, y: str) -> list[Curve]:
    """What is known of each run of the row, `y` against `x`; against bytes, once there were any."""
    curves = []
    for run in row["runs"]:
        points = [(score.get(x), score.get(y)) for score in run["eval_history"]]
        known = [(a, b) for a, b in points if a is not None and b is not None]
        curves.append(sorted((a, b) for a, b in known if a > 0 or x != "bytes"))
    return curves


def _can_be_drawn(curve: Curve) -> bool:
    """Whether there is more than a beginning and an end."""
    return len(curve) > 2 and curve[0][0] < curve[-1][0]


def _ends(row: Mapping[str, Any], y: str) -> list[float]:
    """The last score of each run."""
    last = [run["eval_history"][-1].get(y) for run in row["runs"] if run["eval_history"]]
    return [score for score in last if score is not None]


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean of the curves where all of them are, with straight lines between their points.

    Empty where there is no such place.
    """
    import numpy as np

    start = max(curve[0][0] for curve in curves)
    end = min(curve[-1][0] for curve in curves)
    places = sorted({x for curve in curves for x, _ in curve if start <= x <= end})
    if not places:
        return []
    values = [np.interp(places, *zip(*curve, strict=True)) for curve in curves]
    return list(zip(places, np.mean(values, axis=0).tolist(), strict=True))
