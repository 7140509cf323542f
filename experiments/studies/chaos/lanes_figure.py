"""`chaos.png`: a lane for each process of a run, with the faults that struck it."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ddiloco.telemetry.plots import figure_at
from ddiloco.telemetry.series import StateSpan
from experiments.studies.chaos.lanes import lane
from experiments.studies.chaos.run_files import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    "stepping": "#4c9a6a",
    "merging": "#5b84b1",
    "stalled": "#e3b23c",
    "recovering": "#b9c6d3",
    "hung": "#8e6bb0",
    "dead": "#22252b",
}
_MARKS = {"kill": ("x", "#c0392b"), "hang": ("s", "#8e6bb0"), "partition": ("D", "#d35400")}


def draw(path: pathlib.Path, trace: Trace) -> None:
    """Writes the figure; seconds count from the first step of any learner. May raise OSError."""
    lanes = {target: lane(trace, target) for target in trace.marks}
    start = min((trace.marks[m][0].time for m in trace.learners if trace.marks[m]), default=0.0)
    with figure_at(path, 12, 1.6 + 0.55 * len(lanes)) as figure:
        axes = figure.add_subplot()
        _draw_lanes(axes, lanes, start)
        _draw_faults(axes, trace, list(lanes), start)
        axes.set_yticks(range(len(lanes)), list(lanes))
        axes.invert_yaxis()
        axes.set_xlabel("seconds")
        axes.set_xlim(left=-1)
        axes.spines[["right", "top", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        figure.legend(loc="outside lower center", ncols=9, frameon=False, fontsize=8)


def _draw_lanes(axes: Axes, lanes: Mapping[str, list[StateSpan]], start: float) -> None:
    for state, colour in _COLOURS.items():
        label = state
        for place, spans in enumerate(lanes.values()):
            bars = [(span.start - start, span.end - span.start) for span in spans if span.state == state]
            if bars:
                axes.broken_barh(bars, (place - 0.3, 0.6), color=colour, lw=0, label=label)
                label = None  # one entry in the legend is enough


def _draw_faults(axes: Axes, trace: Trace, names: list[str], start: float) -> None:
    for kind, (marker, colour) in _MARKS.items():
        struck = [blow for blow in trace.blows if blow.kind == kind and blow.target in names]
        if not struck:
            continue
        places = [names.index(blow.target) - 0.4 for blow in struck]
        times = [blow.time - start for blow in struck]
        axes.scatter(times, places, marker=marker, color=colour, s=16, lw=1.2, label=kind, zorder=3)
        for blow, time, place in zip(struck, times, places, strict=True):
            if kind == "partition" and blow.until is not None:
                axes.plot([time, blow.until - start], [place, place], color=colour, lw=1.5, zorder=3)
