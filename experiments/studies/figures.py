"""The figures of studies: comparisons, sweeps, scaling laws, averages, goodput, runs under faults."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ddiloco.telemetry.plots import colours, dress, figure_at
from experiments.studies import results, sweeps
from experiments.studies.chaos.lanes import lane
from experiments.studies.comparison import clock_of, label_of
from experiments.studies.goodput.systems import published

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from experiments.studies.chaos.run_files import Trace
    from experiments.studies.goodput.simulator import Cell

Rows = Sequence[Mapping[str, Any]]
Panel = Callable[["Axes"], None]
Curve = list[tuple[float, float]]

_MEASURES = {"loss": "held-out loss (nats/token)", "accuracy": "held-out accuracy"}
_SKIPPED = 0.1  # share of a curve's start that may lie above the picture: the fall from the initial loss
_PLACES = 6  # across a line of panels, which has one, two or three
_MANY = 6  # lines of a panel above which the legend stands below the panels
_LETTER = 0.06  # inches that a letter of a row's name takes
_WIDE = 8.0  # the largest over the smallest place from which on an axis is logarithmic
_SMALL = {"frameon": False, "fontsize": 8}  # legends


def _draw(
    path: pathlib.Path, lines: Sequence[Sequence[Panel]], width: float, height: float, below: bool = False
) -> None:
    """Writes lines of panels, of this many inches in all; `below`: the first panel's legend is below them."""
    with figure_at(path, width, height, dpi=120) as figure:
        grid = figure.add_gridspec(max(1, len(lines)), _PLACES)
        for i, line in enumerate(lines):
            share = _PLACES // len(line)
            for j, panel in enumerate(line):
                panel(figure.add_subplot(grid[i, j * share : (j + 1) * share]))
        if not lines:
            figure.text(0.5, 0.5, "no run has finished", ha="center", color="0.5")
        if below:
            known = figure.axes[0].get_legend_handles_labels()
            figure.legend(*known, loc="outside lower center", ncols=len(lines[0]), frameon=False, fontsize=7)


def _legend(axes: Axes, **more: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(**_SMALL, **more)


def _legend_above(axes: Axes) -> None:
    _legend(axes, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)


def _name_rows(axes: Axes, names: Iterable[str], title: str) -> None:
    """A panel whose rows have names, the first at the top."""
    known = list(names)
    axes.set_yticks(range(len(known)), known, fontsize=8)
    axes.set_ylim(len(known) - 0.4, -0.6)
    axes.set_xlabel(title)
    dress(axes, "x")


# Comparisons.


def draw_comparison(path: pathlib.Path, rows: Rows) -> None:
    """The figure of `comparison.digest`, with the panels that there are figures for."""
    lines = comparison_panels(rows)
    width = 13 if any(len(line) > 1 for line in lines) else 8
    _draw(path, lines, width, max(1, len(lines)) * max(3.6, 1.4 + 0.42 * len(rows)))


def comparison_panels(rows: Rows) -> list[list[Panel]]:
    """Line by line: scores by tokens, time and bytes; where the chips' time went, and how much it was."""
    lines: list[list[Panel]] = []
    across = {"tokens": "tokens, all learners", "seconds": clock_of(rows), "bytes": "bytes over the links"}
    for y in _MEASURES:
        curves: list[Panel] = [
            functools.partial(_draw_curves, rows, y, x, title)
            for x, title in across.items()
            if any(_is_drawable(curve) for row in rows for curve in curves_of(row, x, y))
        ]
        lines.append(
            curves or [functools.partial(_draw_ends, rows, y)] * any(ends_of(row, y) for row in rows)
        )
    lines.append([])
    if any(row["mean"]["goodput"] is not None for row in rows):
        lines[-1].append(functools.partial(_draw_shares, rows))
    if len(rows) > 1 and any(row["mean"]["time_ratio"] is not None for row in rows):
        lines[-1].append(functools.partial(_draw_times, rows))
    return [line for line in lines if line]


def curves_of(row: Mapping[str, Any], x: str, y: str) -> list[Curve]:
    """What is known of each run of the row, `y` against `x`; against bytes, once there were any."""
    curves = []
    for run in row["runs"]:
        points = [(score.get(x), score.get(y)) for score in run["eval_history"]]
        known = [(a, b) for a, b in points if a is not None and b is not None]
        curves.append(sorted((a, b) for a, b in known if a > 0 or x != "bytes"))
    return curves


def ends_of(row: Mapping[str, Any], y: str) -> list[float]:
    """The last score of each run."""
    last = [run["eval_history"][-1].get(y) for run in row["runs"] if run["eval_history"]]
    return [score for score in last if score is not None]


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean of the curves where all of them are, with straight lines between their points.

    Empty where there is no such place.
    """
    start = max(curve[0][0] for curve in curves)
    end = min(curve[-1][0] for curve in curves)
    places = sorted({x for curve in curves for x, _ in curve if start <= x <= end})
    if not places:
        return []
    values = [np.interp(places, *zip(*curve, strict=True)) for curve in curves]
    return list(zip(places, np.mean(values, axis=0).tolist(), strict=True))


def _labels(rows: Rows) -> list[str]:
    return [textwrap.fill(label_of(row), 30) for row in rows]


def _is_drawable(curve: Curve) -> bool:
    """Whether there is more than a beginning and an end."""
    return len(curve) > 2 and curve[0][0] < curve[-1][0]


def _draw_curves(rows: Rows, y: str, x: str, title: str, axes: Axes) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, PercentFormatter

    tops = []
    for place, (row, colour) in enumerate(zip(rows, colours(len(rows)), strict=True)):
        curves = [curve for curve in curves_of(row, x, y) if _is_drawable(curve)]
        for curve in curves if len(curves) > 1 else ():
            axes.plot(*zip(*curve, strict=True), color=colour, lw=0.7, alpha=0.45)
        mean = mean_curve(curves) if curves else []
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
        _legend(axes)
    dress(axes)


def _draw_ends(rows: Rows, y: str, axes: Axes) -> None:
    """Each run's last score, a dot, and their mean, a line, where runs were scored at their ends only."""
    for place, (row, colour) in enumerate(zip(rows, colours(len(rows)), strict=True)):
        if ends := ends_of(row, y):
            axes.scatter(ends, [place] * len(ends), color=colour, alpha=0.6, s=30)
            axes.scatter([sum(ends) / len(ends)], [place], color=colour, marker="|", s=350, lw=2)
    _name_rows(axes, _labels(rows), f"{_MEASURES[y]} at the end")


def _draw_shares(rows: Rows, axes: Axes) -> None:
    from matplotlib import colormaps

    causes = dict.fromkeys(c for row in rows for c, share in row["lost"].items() if share >= 5e-4)
    parts = {"goodput": "0.35", **dict(zip(causes, colormaps["Set2"].colors, strict=False))}
    for part, colour in parts.items():
        axes.barh(0, 0, color=colour, label=part.replace("_", " "))
    for place, row in enumerate(rows):
        goodput = row["mean"]["goodput"]
        if goodput is None:
            continue
        left = 0.0
        for part, colour in parts.items():
            share = 100 * (goodput if part == "goodput" else row["lost"].get(part, 0.0))
            axes.barh(place, share, left=left, color=colour)
            left += share
        axes.text(1, place, f"{goodput:.1%}", color="white", va="center", fontsize=8)
    _mark_paper(axes, rows, "goodput", 100)
    axes.set_xlim(0, 100)
    _legend_above(axes)
    _name_rows(axes, _labels(rows), "share of the chips' time (%)")


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
    _legend_above(axes)
    _name_rows(axes, _labels(rows), f"{clock_of(rows)} to the end, relative to {rows[0]['label']}")


def _mark_paper(axes: Axes, rows: Rows, name: str, scale: float) -> None:
    marks = [(scale * row["paper"][name], place) for place, row in enumerate(rows) if name in row["paper"]]
    if marks:
        looks = {"color": "white", "edgecolor": "black", "marker": "D", "s": 34, "zorder": 5}
        axes.scatter(*zip(*marks, strict=True), **looks, clip_on=False, label="the paper")


# Sweeps.


def draw_sweep(path: pathlib.Path, rows: Rows, sweep: sweeps.Sweep) -> None:
    """Losses, and accuracies and gaps if there are any: lines along the sweep's axis, or point by point."""
    layout, runs = sweeps.axes_of(sweep.points), sweeps.placed(rows, sweep)
    runs["gap"] *= 100
    panels = {"eval_loss": _MEASURES["loss"]}
    if runs.eval_accuracy.notna().any():
        panels["eval_accuracy"] = _MEASURES["accuracy"]
    if sweep.baseline:
        name = ", ".join(str(value) for value in sweep.baseline.values()).replace("_", "-")
        panels["gap"] = f"loss above {name} (%)"
    lines = runs.line.nunique()
    below = layout.x is not None and lines > _MANY
    height = 4.2 if layout.x else 1.4 + 0.34 * lines
    height += 0.2 * math.ceil(lines / len(panels)) if below else 0.0
    names = 0.0 if layout.x else _LETTER * max(map(len, runs.line), default=0)

    def draw(figure: str, title: str, axes: Axes) -> None:
        if not runs[figure].notna().any():
            axes.text(0.5, 0.5, "no run has one", transform=axes.transAxes, ha="center", color="0.5")
        if not layout.x:
            _draw_points(axes, runs, figure, title)
            return
        _draw_lines(axes, runs, figure)
        axes.set_xlabel(layout.x)
        axes.set_ylabel(title)
        if layout.lines and not below:
            title = layout.lines[0] if len(layout.lines) == 1 else None
            _legend(axes, title=title, title_fontsize=8)
        dress(axes)

    line = [functools.partial(draw, figure, title) for figure, title in panels.items()]
    _draw(path, [line], 1 + (5.2 + names) * len(panels), height, below)


def _draw_lines(axes: Axes, runs: pd.DataFrame, figure: str) -> None:
    """A line for each name, with bars of one standard deviation; of one at a single place, a level."""
    means, deviations = results.over_seeds(runs, ["line", "x"], [figure])
    one_point, places = len(means) == 1, set()
    for i, (name, own) in enumerate(means[figure].groupby("line", sort=False)):
        x = own.index.get_level_values("x")
        places |= set(x) if len(own) > 1 else set()
        known = own.droplevel("line").dropna().sort_index()
        if known.empty:
            continue
        if len(own) == 1 and not one_point:
            axes.axhline(known.iloc[0], color=f"C{i % 10}", ls="--", lw=1.2, label=name)
        else:
            form = {"marker": "osD^v"[i // 10 % 5], "ms": 4, "capsize": 2, "color": f"C{i % 10}"}
            spread = deviations[figure].xs(name, level="line").reindex(known.index).fillna(0.0)
            axes.errorbar(known.index, known, yerr=spread, label=name, **form)
    ordered = sorted(places)
    if ordered and ordered[0] > 0 and ordered[-1] >= _WIDE * ordered[0]:
        axes.set_xscale("log", base=2)
    if 1 < len(ordered) <= 8:
        axes.set_xticks(ordered, [f"{place:g}" for place in ordered])
        axes.minorticks_off()


def _draw_points(axes: Axes, runs: pd.DataFrame, figure: str, title: str) -> None:
    """A row for each name, the best at the top."""
    means, deviations = results.over_seeds(runs, ["line"], [figure])
    known = means[figure].dropna().sort_values()
    for place, (name, mean) in enumerate(known.items()):
        spread = deviations[figure][name]
        axes.errorbar(
            mean, place, xerr=spread if spread > 0 else None, color="C0", marker="o", ms=5, capsize=2
        )
    _name_rows(axes, [name or "all" for name in known.index], title)
    axes.set_ylim(max(len(known), len(means)) - 0.4, -0.6)


# Scaling laws.


def draw_scaling(path: pathlib.Path, found: Mapping[str, Any]) -> None:
    """The figure of a scaling study: losses and their laws, errors at the held-out size, best values."""
    panels: list[Panel] = [lambda axes: _draw_losses(axes, found["losses"], found["laws"])]
    if any(law.get("held_out") for law in found["laws"]):
        panels.append(lambda axes: _draw_errors(axes, found["laws"]))
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for entry in found["hyperparameters"]:
        by_name.setdefault(entry["name"], []).append(entry)
    for entries in by_name.values():
        panels.append(lambda axes, entries=entries: _draw_best(axes, entries))
    lines = [panels[i : i + 2] for i in range(0, len(panels), 2)]
    _draw(path, lines, 13 if len(panels) > 1 else 7, 4.4 * len(lines))


def _draw_losses(axes: Axes, losses: Rows, laws: Rows) -> None:
    """Of each size the runs with the most tokens, and the law of each number of learners alone."""
    most = dict(sorted((row["params"], row["tokens"]) for row in losses))
    alone = {
        law["learners"][0]: law for law in laws if len(law["learners"]) == 1 and law["formula"] == "A N^alpha"
    }
    for learners in sorted({row["learners"] for row in losses}):
        own = [r for r in losses if r["learners"] == learners and r["tokens"] == most[r["params"]]]
        if own:
            spread = [r["spread"] or 0.0 for r in own]
            _draw_law(axes, learners, own, [r["loss"] for r in own], alone.get(learners), spread)
    _scale(axes, most)
    axes.set_ylabel(_MEASURES["loss"])
    axes.set_title("loss at the most tokens of each size; lines: A N^alpha", fontsize=10)


def _draw_best(axes: Axes, entries: Rows) -> None:
    for entry in entries:
        for learners in sorted({value["learners"] for value in entry["values"]}):
            own = [value for value in entry["values"] if value["learners"] == learners]
            _draw_law(axes, learners, own, [value["value"] for value in own], entry)
    _scale(axes, {value["params"] for entry in entries for value in entry["values"]})
    axes.set_title(f"best {entries[0]['title']}", fontsize=10)


def _draw_law(
    axes: Axes,
    learners: int,
    own: Rows,
    values: Sequence[float],
    law: Mapping[str, Any] | None,
    spread: Sequence[float] | None = None,
) -> None:
    """Values by size, of one number of learners, and a power law through them if there is one."""
    sizes = [row["params"] for row in own]
    colour = "0.3" if not learners else f"C{learners.bit_length() - 1}"
    looks = {"color": colour, "fmt": "o", "ms": 4, "capsize": 2, "label": results.learners_name(learners)}
    axes.errorbar(sizes, values, yerr=spread, **looks)
    if law and not law["problem"]:
        named = law["parameters"]
        scale = named["A"] * max(1, learners) ** named.get("beta", 0.0)
        axes.plot(sizes, [scale * n ** named.get("alpha", 0.0) for n in sizes], color=colour, lw=1)


def _draw_errors(axes: Axes, laws: Rows) -> None:
    known = [law for law in laws if law.get("held_out")]
    axes.barh(range(len(known)), [100 * law["held_out"]["error"] for law in known], color="0.5")
    _name_rows(axes, [law["name"] for law in known], "mean error of the loss (%)")
    axes.set_title("at the largest size, by laws that never saw it", fontsize=10)


def _scale(axes: Axes, sizes: Iterable[int]) -> None:
    """Logarithmic axes, the sizes marked."""
    from matplotlib.ticker import EngFormatter, FormatStrFormatter, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sorted(sizes))
    axes.xaxis.set_major_formatter(EngFormatter(places=0, sep=""))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(FormatStrFormatter("%g"))
    axes.grid(which="minor", alpha=0.25)
    axes.set_xlabel("parameters")
    _legend(axes)
    dress(axes)


# Averages of parameters.


def draw_averages(path: pathlib.Path, points: pd.DataFrame, metrics: Mapping[str, str]) -> None:
    """Scores by step, a line for each name; a panel for each of these metrics, by their titles."""

    def draw(metric: str, axes: Axes) -> None:
        for name, own in points.groupby("name", sort=False):
            if metric == "loss":
                own = own[own.step > 0]  # the initial loss would hide all that follows
            axes.plot(own.step, own[metric], marker=".", **_line_of_average(str(name)))
        axes.set_xlabel("step")
        axes.set_title(metrics[metric], fontsize=10)
        dress(axes)
        if metric == "loss":
            _legend(axes)

    panels = [functools.partial(draw, metric) for metric in metrics]
    lines = [panels[i : i + 2] for i in range(0, len(panels), 2)]
    _draw(path, lines, 6.5 * len(lines[0]), 4 * len(lines))


def _line_of_average(name: str) -> dict[str, Any]:
    kind, _, number = name.partition(" ")
    if kind == "learner":
        return {"color": "0.6", "lw": 1, "label": "learners" if number == "0" else None}
    width = 1.4 if name.endswith(" rounds") else 2.2
    return {"lw": width, "ls": "-" if name == "global model" else "--", "label": name}


# Simulated goodput.


def draw_goodput(stem: pathlib.Path, cells: Sequence[Cell]) -> list[pathlib.Path]:
    """Writes STEM_goodput.png, STEM_attribution.png, STEM_uptime.png; returns their paths."""
    shares = [{**cell.lost, **dataclasses.asdict(cell), "system": cell.label} for cell in cells]
    frame = pd.DataFrame(shares)
    causes = [cause for cause in cells[0].lost if (frame[cause] >= 5e-4).any()]
    lost = [(count, own) for count, own in frame.groupby("num_chips")]
    pictures: dict[str, list[Panel]] = {
        "goodput": [functools.partial(_draw_goodput, frame)],
        "attribution": [functools.partial(_draw_lost, causes, *one) for one in lost if causes],
        "uptime": [functools.partial(_draw_uptime, frame)],
    }
    paths = []
    for name, panels in pictures.items():
        paths.append(stem.with_name(f"{stem.name}_{name}.png"))
        with figure_at(paths[-1], 9, 5.2) as figure:
            all_axes = figure.subplots(1, max(1, len(panels)), sharey=True, squeeze=False)[0]
            for axes, panel in zip(all_axes, panels, strict=False):
                panel(axes)
            if name == "attribution" and causes:
                handles = all_axes[0].get_legend_handles_labels()
                figure.legend(*handles, loc="outside upper center", ncols=len(causes), **_SMALL)
    return paths


def _by_system(frame: pd.DataFrame, figure: str) -> pd.DataFrame:
    """The figure in percent: a line for each number of chips, a column for each system in their order."""
    values = frame.pivot(index="num_chips", columns="system", values=figure).astype(float)
    return 100 * values[frame.system.unique()]


def _draw_goodput(frame: pd.DataFrame, axes: Axes) -> None:
    goodput, spread = _by_system(frame, "goodput"), _by_system(frame, "ci95").fillna(0.0)
    looks = dict(zip(goodput, colours(len(goodput.columns)), strict=True))
    for system, colour in looks.items():
        known = goodput[system].dropna()
        bars = spread[system][known.index]
        axes.errorbar(known.index, known, yerr=bars, color=colour, marker="o", ms=4, label=system)
    points = [(n, x, colour) for s, colour in looks.items() for n in goodput.index if (x := published(s, n))]
    for count, percent, colour in points:
        axes.scatter(count, percent, color=colour, marker="x", s=60, zorder=5)
    if points:
        axes.scatter([], [], color="0.3", marker="x", s=60, label="the paper")
    _by_chips(axes, goodput.index, "goodput (%)")


def _draw_uptime(frame: pd.DataFrame, axes: Axes) -> None:
    uptime, quorum = _by_system(frame, "uptime"), _by_system(frame, "quorum_uptime")
    for system, colour in zip(uptime, colours(len(uptime.columns)), strict=True):
        axes.plot(uptime[system].dropna(), color=colour, marker="o", ms=4, label=system)
        if quorum[system].notna().any():
            axes.plot(quorum[system].dropna(), color=colour, ls=":", label=f"{system}, a quorum")
    _by_chips(axes, uptime.index, "uptime (%)")


def _draw_lost(causes: Sequence[str], count: int, frame: pd.DataFrame, axes: Axes) -> None:
    """Bars of the time that systems of so many chips lost, by cause."""
    shares = 100 * frame.set_index("system")[causes]
    bottoms = shares.cumsum(axis=1) - shares
    for cause in causes:
        name = cause.replace("_", " ")
        axes.bar(range(len(shares)), shares[cause], bottom=bottoms[cause], width=0.8, label=name)
    axes.set_title(f"{count:,} chips", fontsize=9)
    axes.set_xticks(range(len(shares)), shares.index, rotation=90, fontsize=8)
    axes.set_ylim(0, 100)
    axes.grid(axis="y", alpha=0.25)
    if axes.get_subplotspec().is_first_col():
        axes.set_ylabel("chip time lost (%)")


def _by_chips(axes: Axes, counts: Iterable[int], title: str) -> None:
    from matplotlib.ticker import EngFormatter, NullFormatter

    axes.set_xscale("log")
    axes.set_xticks(list(counts))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("chips")
    axes.set_ylabel(title)
    axes.set_ylim(0, 103)
    dress(axes)
    _legend(axes)


# Runs under faults.

_STATES = {
    "stepping": "#4c9a6a",
    "merging": "#5b84b1",
    "stalled": "#e3b23c",
    "recovering": "#b9c6d3",
    "hung": "#8e6bb0",
    "dead": "#22252b",
}
_FAULTS = {"kill": ("x", "#c0392b"), "hang": ("s", "#8e6bb0"), "partition": ("D", "#d35400")}


def draw_lanes(path: pathlib.Path, trace: Trace) -> None:
    """A lane for each process of a run, with the faults that struck it; time is from the first step."""
    lanes = {target: lane(trace, target) for target in trace.marks}
    start = min((trace.marks[m][0].time for m in trace.learners if trace.marks[m]), default=0.0)
    with figure_at(path, 12, 1.6 + 0.55 * len(lanes)) as figure:
        axes = figure.add_subplot()
        for state, colour in _STATES.items():
            label: str | None = state  # one entry in the legend is enough
            for place, spans in enumerate(lanes.values()):
                bars = [(span.start - start, span.end - span.start) for span in spans if span.state == state]
                if bars:
                    axes.broken_barh(bars, (place - 0.3, 0.6), color=colour, lw=0, label=label)
                    label = None
        for kind, (marker, colour) in _FAULTS.items():
            struck = [blow for blow in trace.blows if blow.kind == kind and blow.target in lanes]
            places = [list(lanes).index(blow.target) - 0.4 for blow in struck]
            if struck:
                times = [blow.time - start for blow in struck]
                axes.scatter(times, places, marker=marker, color=colour, s=16, lw=1.2, label=kind, zorder=3)
            for blow, place in zip(struck, places, strict=True):
                if blow.until is not None and kind == "partition":
                    span = [blow.time - start, blow.until - start]
                    axes.plot(span, [place, place], color=colour, lw=1.5, zorder=3)
        axes.set_yticks(range(len(lanes)), list(lanes))
        axes.invert_yaxis()
        axes.set_xlabel("seconds")
        axes.set_xlim(left=-1)
        axes.spines[["right", "top", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        figure.legend(loc="outside lower center", ncols=9, **_SMALL)
