"""Pictures of simulated cells: goodput against chips, what took the rest, and uptime."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddiloco.telemetry.plots import colours, dress, figure_at
from experiments.studies.goodput.simulator import Cell
from experiments.studies.goodput.systems import published

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_all(stem: pathlib.Path, cells: Sequence[Cell]) -> list[pathlib.Path]:
    """Writes STEM_goodput.png, STEM_attribution.png, STEM_uptime.png; returns their paths."""
    paths = []
    for name, draw in (
        ("goodput", _draw_goodput),
        ("attribution", _draw_attribution),
        ("uptime", _draw_uptime),
    ):
        paths.append(stem.with_name(f"{stem.name}_{name}.png"))
        with figure_at(paths[-1], 9, 5.2) as figure:
            draw(figure, cells)
    return paths


def _draw_goodput(figure: Figure, cells: Sequence[Cell]) -> None:
    axes = figure.add_subplot()
    has_published = False
    for label, own, colour in _systems(cells):
        chips = [cell.num_chips for cell in own]
        spread = [100 * (cell.ci95 or 0.0) for cell in own]
        goodput = [100 * cell.goodput for cell in own]
        axes.errorbar(chips, goodput, yerr=spread, color=colour, marker="o", markersize=4, label=label)
        points = [(count, percent) for count in chips if (percent := published(label, count)) is not None]
        if points:
            axes.scatter(*zip(*points, strict=True), color=colour, marker="x", s=60, zorder=5)
            has_published = True
    if has_published:
        axes.scatter([], [], color="0.3", marker="x", s=60, label="the paper")
    _label(axes, cells, "goodput (%)")


def _draw_uptime(figure: Figure, cells: Sequence[Cell]) -> None:
    axes = figure.add_subplot()
    for label, own, colour in _systems(cells):
        chips = [cell.num_chips for cell in own]
        axes.plot(chips, [100 * cell.uptime for cell in own], color=colour, marker="o", ms=4, label=label)
        quorum = [(c.num_chips, 100 * c.quorum_uptime) for c in own if c.quorum_uptime is not None]
        if quorum:
            axes.plot(*zip(*quorum, strict=True), color=colour, ls=":", label=f"{label}, a quorum")
    _label(axes, cells, "uptime (%)")


def _draw_attribution(figure: Figure, cells: Sequence[Cell]) -> None:
    from matplotlib import colormaps

    systems, counts = _systems(cells), sorted({cell.num_chips for cell in cells})
    causes = [cause for cause in cells[0].lost if any(cell.lost[cause] >= 5e-4 for cell in cells)]
    of_cause = dict(zip(causes, colormaps["tab10"].colors, strict=False))
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for count, axes in zip(counts, panels, strict=True):
        for place, (_, own, _) in enumerate(systems):
            bottom = 0.0
            for cell in (cell for cell in own if cell.num_chips == count):
                for cause in causes:
                    share = 100 * cell.lost[cause]
                    axes.bar(place, share, bottom=bottom, color=of_cause[cause], width=0.8)
                    bottom += share
        axes.set_title(f"{count:,} chips", fontsize=9)
        axes.set_xticks(range(len(systems)), [label for label, _, _ in systems], rotation=90, fontsize=8)
        axes.grid(axis="y", alpha=0.25)
    panels[0].set_ylim(0, 100)
    panels[0].set_ylabel("chip time lost (%)")
    for cause in causes:
        panels[0].bar(0, 0, color=of_cause[cause], label=cause.replace("_", " "))
    if causes:
        figure.legend(loc="outside upper center", ncols=len(causes), frameon=False, fontsize=9)


def _label(axes: Axes, cells: Sequence[Cell], name: str) -> None:
    from matplotlib.ticker import EngFormatter, NullFormatter

    counts = sorted({cell.num_chips for cell in cells})
    axes.set_xscale("log")
    axes.set_xticks(counts)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("chips")
    axes.set_ylabel(name)
    axes.set_ylim(0, 103)
    dress(axes)
    axes.legend(frameon=False, fontsize=9)


def _systems(cells: Sequence[Cell]) -> list[tuple[str, list[Cell], tuple[float, ...]]]:
    """The label of each system, its cells by the number of chips, and its colour."""
    systems: dict[str, list[Cell]] = {cell.label: [] for cell in cells}
    for cell in sorted(cells, key=lambda cell: cell.num_chips):
        systems[cell.label].append(cell)
    return [(*entry, colour) for entry, colour in zip(systems.items(), colours(len(systems)), strict=True)]
