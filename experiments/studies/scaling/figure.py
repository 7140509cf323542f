"""The figure of a scaling study: losses with a law through them, errors at the held-out size, best values."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddiloco.telemetry.plots import dress, figure_at
from experiments.studies.scaling.tables import title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Found = Mapping[str, Any]  # of `studies.scaling.study`


def draw(path: pathlib.Path, found: Found) -> None:
    """Writes the figure, with the panels that there are figures for."""
    panels: list[Callable[[Axes], None]] = [lambda axes: _draw_losses(axes, found["losses"], found["laws"])]
    if any(law.get("held_out") for law in found["laws"]):
        panels.append(lambda axes: _draw_errors(axes, found["laws"]))
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for entry in found["hyperparameters"]:
        by_name.setdefault(entry["name"], []).append(entry)
    for entries in by_name.values():
        panels.append(lambda axes, entries=entries: _draw_best(axes, entries))
    lines = -(-len(panels) // 2)
    width = 13 if len(panels) > 1 else 7
    with figure_at(path, width, 4.4 * lines, dpi=120) as figure:
        for place, panel in enumerate(panels):
            axes = figure.add_subplot(lines, min(2, len(panels)), place + 1)
            panel(axes)
            dress(axes)


def _draw_losses(axes: Axes, losses: Sequence[Mapping[str, Any]], laws: Sequence[Mapping[str, Any]]) -> None:
    """Of each size the runs with the most tokens, and the law of each number of learners alone."""
    most = dict(sorted((row["params"], row["tokens"]) for row in losses))
    alone = {
        law["learners"][0]: law for law in laws if len(law["learners"]) == 1 and law["formula"] == "A N^alpha"
    }
    for learners in sorted({row["learners"] for row in losses}):
        own = [r for r in losses if r["learners"] == learners and r["tokens"] == most[r["params"]]]
        if not own:
            continue
        sizes, means = [r["params"] for r in own], [r["loss"] for r in own]
        colour = _colour(learners)
        spread = [r["spread"] or 0.0 for r in own]
        axes.errorbar(
            sizes, means, yerr=spread, color=colour, fmt="o", ms=4, capsize=2, label=title(learners)
        )
        law = alone.get(learners)
        if law and not law["problem"]:
            scale, alpha = law["parameters"]["A"], law["parameters"]["alpha"]
            axes.plot(sizes, [scale * n**alpha for n in sizes], color=colour, lw=1)
    _scale(axes, most)
    axes.set_ylabel("held-out loss (nats/token)")
    axes.set_title("loss at the most tokens of each size; lines: A N^alpha", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def _draw_errors(axes: Axes, laws: Sequence[Mapping[str, Any]]) -> None:
    known = [law for law in laws if law.get("held_out")]
    errors = [100 * law["held_out"]["error"] for law in known]
    axes.barh(range(len(known)), errors, color="0.5")
    axes.set_yticks(range(len(known)), [law["name"] for law in known], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("mean error of the loss (%)")
    axes.set_title("at the largest size, by laws that never saw it", fontsize=10)


def _draw_best(axes: Axes, entries: Sequence[Mapping[str, Any]]) -> None:
    for entry in entries:
        for learners in sorted({value["learners"] for value in entry["values"]}):
            own = [value for value in entry["values"] if value["learners"] == learners]
            sizes = [value["params"] for value in own]
            colour = _colour(learners)
            best = [value["value"] for value in own]
            axes.plot(sizes, best, "o", ms=4, color=colour, label=title(learners))
            if not entry["problem"]:
                named = entry["parameters"]
                scale = named["A"] * max(1, learners) ** named.get("beta", 0.0)
                axes.plot(sizes, [scale * n ** named.get("alpha", 0.0) for n in sizes], color=colour, lw=1)
    _scale(axes, {value["params"] for entry in entries for value in entry["values"]})
    axes.set_title(f"best {entries[0]['title']}", fontsize=10)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)


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


def _colour(learners: int) -> str:
    """The same for a number of learners in every panel."""
    return "0.3" if not learners else f"C{learners.bit_length() - 1}"
