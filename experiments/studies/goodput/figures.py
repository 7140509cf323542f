"""Pictures of simulated cells: goodput against chips, what took the rest, and uptime."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from experiments.studies.goodput.published import published
from experiments.studies.goodput.simulator import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_all(stem: pathlib.Path, cells: Sequence[Cell]) -> list[pathlib.Path]:
    """Writes STEM_goodput.png, STEM_attribution.png and STEM_uptime.png; returns their paths.

    Raises:
      OSError: the disk refused; no half-written figure is left.
    """
    drawings: dict[str, Callable[[Figure, Sequence[Cell]], None]] = {
        "goodput": _draw_goodput,
        "attribution": _draw_attribution,
        "uptime": _draw_uptime,
    }
    paths = []
    for name, draw in drawings.items():
        path = stem.with_name(f"{stem.name}_{name}.png")
        _save(path, draw, cells)
        paths.append(path)
    return paths


def _save(path: pathlib.Path, draw: Callable[[Figure, Sequence[Cell]], None], cells: Sequence[Cell]) -> None:
    # Matplotlib takes a second to import, which only those who draw should pay.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), dpi=130, layout="constrained")
    draw(figure, cells)
    new = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        FigureCanvasAgg(figure).print_png(new)
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _draw_goodput(figure: Figure, cells: Sequence[Cell]) -> None:
    axes = figure.add_subplot()
    told = False
    for (label, own), colour in zip(_by_system(cells).items(), _colours(cells), strict=True):
        chips = [cell.num_chips for cell in own]
        spread = [100 * (cell.ci95 or 0.0) for cell in own]
        goodput = [100 * cell.goodput for cell in own]
        axes.errorbar(chips, goodput, yerr=spread, color=colour, marker="o", markersize=4, label=label)
        points = [(count, percent) for count in chips if (percent := published(label, count)) is not None]
        if points:
            axes.scatter(*zip(*points, strict=True), color=colour, marker="x", s=60, zorder=5)
            told = True
    if told:
        axes.scatter([], [], color="0.3", marker="x", s=60, label="the paper")
    _dress(axes, cells, "goodput (%)")


def _draw_uptime(figure: Figure, cells: Sequence[Cell]) -> None:
    axes = figure.add_subplot()
    for (label, own), colour in zip(_by_system(cells).items(), _colours(cells), strict=True):
        chips = [cell.num_chips for cell in own]
        axes.plot(chips, [100 * cell.uptime for cell in own], color=colour, marker="o", ms=4, label=label)
        quorum = [(c.num_chips, 100 * c.quorum_uptime) for c in own if c.quorum_uptime is not None]
        if quorum:
            axes.plot(*zip(*quorum, strict=True), color=colour, ls=":", label=f"{label}, a quorum")
    _dress(axes, cells, "uptime (%)")


def _draw_attribution(figure: Figure, cells: Sequence[Cell]) -> None:
    from matplotlib import colormaps

    systems, counts = _by_system(cells), sorted({cell.num_chips for cell in cells})
    causes = [cause for cause in cells[0].lost if any(cell.lost[cause] >= 5e-4 for cell in cells)]
    colours = dict(zip(causes, colormaps["tab10"].colors, strict=False))
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for count, axes in zip(counts, panels, strict=True):
        for place, own in enumerate(systems.values()):
            bottom = 0.0
            for cell in (cell for cell in own if cell.num_chips == count):
                for cause in causes:
                    share = 100 * cell.lost[cause]
                    axes.bar(place, share, bottom=bottom, color=colours[cause], width=0.8)
                    bottom += share
        axes.set_title(f"{count:,} chips", fontsize=9)
        axes.set_xticks(range(len(systems)), list(systems), rotation=90, fontsize=8)
        axes.grid(axis="y", alpha=0.25)
    panels[0].set_ylim(0, 100)
    panels[0].set_ylabel("chip time lost (%)")
    for cause in causes:
        panels[0].bar(0, 0, color=colours[cause], label=cause.replace("_", " "))
    if causes:
        figure.legend(loc="outside upper center", ncols=len(causes), frameon=False, fontsize=9)


def _dress(axes: Axes, cells: Sequence[Cell], name: str) -> None:
    from matplotlib.ticker import EngFormatter, NullFormatter

    counts = sorted({cell.num_chips for cell in cells})
    axes.set_xscale("log")
    axes.set_xticks(counts)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("chips")
    axes.set_ylabel(name)
    axes.set_ylim(0, 103)
    axes.grid(alpha=0.25)
    axes.spines[["right", "top"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)


def _by_system(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    systems: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.num_chips):
        systems.setdefault(cell.label, []).append(cell)
    order = list(dict.fromkeys(cell.label for cell in cells))
    return {label: systems[label] for label in order}


def _colours(cells: Sequence[Cell]) -> list[tuple[float, ...]]:
    from matplotlib import colormaps

    count = len(_by_system(cells))
    table = colormaps["tab10"] if count <= 10 else colormaps["turbo"].resampled(count)
    return [table(place)[:3] for place in range(count)]
