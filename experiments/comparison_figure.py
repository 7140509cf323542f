"""The figure of a comparison: losses by tokens and by time, where the chips' time went, time to the end."""

from __future__ import annotations

import functools
import pathlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]  # of `experiments.comparison.digest`
Curve = list[tuple[float, float]]

_SKIPPED = 0.1  # share of a curve's start that may lie above the picture: the fall from the initial loss


def draw(path: pathlib.Path, rows: Rows, clock: str) -> None:
    """Writes the figure, with the panels that there are figures for; `clock` names the seconds."""
    # Matplotlib takes a second to import, which a usage error should not wait for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _panels(rows, clock)
    lines = max(1, -(-len(panels) // 2))
    size = (13 if len(panels) > 1 else 8, lines * max(3.6, 1.4 + 0.42 * len(rows)))
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    grid = figure.add_gridspec(lines, 2)
    for place, panel in enumerate(panels):
        alone = place == len(panels) - 1 and place % 2 == 0
        panel(figure.add_subplot(grid[place // 2, :] if alone else grid[place // 2, place % 2]))
    if not panels:
        figure.text(0.5, 0.5, "no run has finished", ha="center", color="0.5")
    FigureCanvasAgg(figure).print_png(path)


def _panels(rows: Rows, clock: str) -> list[Callable[[Axes], None]]:
    panels: list[Callable[[Axes], None]] = []
    for x, title in (("tokens", "tokens, all learners"), ("seconds", clock)):
        if any(len(curve) > 1 for row in rows for curve in _curves(row, x)):
            panels.append(functools.partial(_draw_losses, rows, x, title))
    if any(row["mean"]["goodput"] is not None for row in rows):
        panels.append(functools.partial(_draw_shares, rows))
    if len(rows) > 1 and any(row["mean"]["time_ratio"] is not None for row in rows):
        panels.append(functools.partial(_draw_times, rows, clock))
    return panels


def _draw_losses(rows: Rows, x: str, title: str, axes: Axes) -> None:
    from matplotlib.ticker import EngFormatter

    tops = []
    for row, colour in zip(rows, _colours(len(rows)), strict=True):
        curves = [curve for curve in _curves(row, x) if len(curve) > 1]
        if not curves:
            continue
        if len(curves) > 1:
            for curve in curves:
                axes.plot(*zip(*curve, strict=True), color=colour, lw=0.7, alpha=0.45)
        mean = mean_curve(curves)
        if not mean:
            continue
        axes.plot(*zip(*mean, strict=True), color=colour, lw=2.2, label=row["label"])
        tops.append(_top(mean))
    if tops:
        lowest, highest = min(y for line in axes.lines for y in line.get_ydata()), max(tops)
        margin = 0.06 * (highest - lowest) or 0.1
        axes.set_ylim(lowest - margin, highest + margin)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel(title)
    axes.set_ylabel("held-out loss (nats/token)")
    axes.legend(frameon=False, fontsize=8)
    _clean(axes, "both")


def _draw_shares(rows: Rows, axes: Axes) -> None:
    from matplotlib import colormaps

    causes = dict.fromkeys(c for row in rows for c, share in row["lost"].items() if share >= 5e-4)
    colours = dict(zip(causes, colormaps["Set2"].colors, strict=False))
    for place, row in enumerate(rows):
        goodput = row["mean"]["goodput"]
        if goodput is None:
            continue
        axes.barh(place, 100 * goodput, color="0.35")
        axes.text(1, place, f"{goodput:.1%}", color="white", va="center", fontsize=8)
        left = 100 * goodput
        for cause in causes:
            share = 100 * row["lost"].get(cause, 0.0)
            axes.barh(place, share, left=left, color=colours[cause])
            left += share
    axes.barh(0, 0, color="0.35", label="goodput")
    for cause in causes:
        axes.barh(0, 0, color=colours[cause], label=cause.replace("_", " "))
    _mark_paper(axes, rows, "goodput", 100)
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the chips' time (%)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, fontsize=8)
    _name_bars(axes, rows)


def _draw_times(rows: Rows, clock: str, axes: Axes) -> None:
    for place, (row, colour) in enumerate(zip(rows, _colours(len(rows)), strict=True)):
        ratio, spread = row["mean"]["time_ratio"], row["std"]["time_ratio"]
        if ratio is not None:
            axes.barh(place, ratio, xerr=spread, color=colour, ecolor="0.2", capsize=2)
            axes.text(0.01 * ratio, place, f"{ratio:.2f}", color="white", va="center", fontsize=8)
    _mark_paper(axes, rows, "time_ratio", 1)
    axes.axvline(1, color="0.3", lw=0.8, ls=":")
    axes.set_xlim(left=0)
    first = rows[0]["label"]
    axes.set_xlabel(f"{clock} to the end, relative to {first}")
    if any("time_ratio" in row["paper"] for row in rows):
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=8)
    _name_bars(axes, rows)


def _mark_paper(axes: Axes, rows: Rows, name: str, scale: float) -> None:
    marks = [(scale * row["paper"][name], place) for place, row in enumerate(rows) if name in row["paper"]]
    if marks:
        looks = {"color": "white", "edgecolor": "black", "marker": "D", "s": 34, "zorder": 5}
        axes.scatter(*zip(*marks, strict=True), **looks, clip_on=False, label="the paper")


def _name_bars(axes: Axes, rows: Rows) -> None:
    axes.set_yticks(range(len(rows)), [textwrap.fill(row["label"], 30) for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    _clean(axes, "x")


def _clean(axes: Axes, grid: str) -> None:
    axes.grid(axis=grid, alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["right", "top"]].set_visible(False)


def _curves(row: Mapping[str, Any], x: str) -> list[Curve]:
    """The held-out losses of each run of the row, against `x`, where they are known."""
    return [
        sorted((score[x], score["loss"]) for score in run["eval_history"] if score["loss"] is not None)
        for run in row["runs"]
    ]


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


def _top(curve: Curve) -> float:
    start, end = curve[0][0], curve[-1][0]
    return max((y for x, y in curve if x >= start + _SKIPPED * (end - start)), default=curve[-1][1])


def _colours(count: int) -> list[tuple[float, ...]]:
    from matplotlib import colormaps

    table = colormaps["tab10"] if count <= 10 else colormaps["turbo"].resampled(count)
    return [table(place)[:3] for place in range(count)]
