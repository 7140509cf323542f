"""The figure of a sweep: losses along the axis with a line for what else differs, or point by point."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from experiments.studies import series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Spread = Callable[[series.Group], Sequence[float]]  # a group's values, of one panel
_MANY = 6  # lines above which the legend stands below the panels
_WIDE = 8.0  # the largest over the smallest place from which on the axis is logarithmic


def draw(
    path: pathlib.Path,
    rows: Sequence[series.Row],
    axes: series.Axes,
    baseline: series.Row | None,
) -> None:
    """Writes the figure: held-out loss and, where there are any, accuracy and the gap to the baseline."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = series.groups(rows, axes)
    panels: dict[str, Spread] = {"held-out loss (nats/token)": lambda group: group.values("eval_loss")}
    if any(group.values("eval_accuracy") for group in groups):
        panels["held-out accuracy"] = lambda group: group.values("eval_accuracy")
    if baseline:
        name = ", ".join(str(value) for value in baseline.values()).replace("_", "-")
        panels[f"loss above {name} (%)"] = lambda group: [
            100 * gap for gap in series.gaps(group, rows, axes, baseline, "eval_loss")
        ]
    names = list(dict.fromkeys(group.line for group in groups))
    below = axes.x is not None and len(names) > _MANY
    height = 4.2 if axes.x else 1.4 + 0.34 * len(names)
    height += 0.2 * math.ceil(len(names) / len(panels)) if below else 0.0
    figure = Figure(figsize=(1 + 5.2 * len(panels), height), dpi=120, layout="constrained")
    for panel, (title, values) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        if axes.x:
            _draw_lines(panel, groups, names, values)
            panel.set_xlabel(axes.x)
            panel.set_ylabel(title)
            if axes.lines and not below:
                _tell_lines(panel, axes)
        else:
            _draw_points(panel, groups, names, values)
            panel.set_xlabel(title)
        panel.grid(alpha=0.25)
        panel.spines[["right", "top"]].set_visible(False)
    if below:
        known = figure.axes[0].get_legend_handles_labels()
        figure.legend(*known, loc="outside lower center", ncols=len(panels), frameon=False, fontsize=7)
    FigureCanvasAgg(figure).print_png(path)


def _draw_lines(panel: Axes, groups: Sequence[series.Group], names: Sequence[str], values: Spread) -> None:
    """A line for each name, with bars of one standard deviation; of one at a single place, a level."""
    places = sorted({group.x for group in groups if sum(g.line == group.line for g in groups) > 1})
    for i, name in enumerate(names):
        members = [group for group in groups if group.line == name]
        known = [(group.x, *spread) for group in members if (spread := series.mean_and_spread(values(group)))]
        known = sorted(entry for entry in known if math.isfinite(entry[1]))
        if not known:
            continue
        x, mean, spread = zip(*known, strict=True)
        if len(members) == 1 and len(groups) > 1:
            panel.axhline(mean[0], color=f"C{i % 10}", ls="--", lw=1.2, label=name)
        else:
            form = {"marker": "osD^v"[i // 10 % 5], "ms": 4, "capsize": 2}
            panel.errorbar(x, mean, yerr=spread, color=f"C{i % 10}", label=name, **form)
    if places and places[0] > 0 and places[-1] >= _WIDE * places[0]:
        panel.set_xscale("log", base=2)
    if 1 < len(places) <= 8:
        panel.set_xticks(places, [f"{place:g}" for place in places])
        panel.minorticks_off()


def _draw_points(panel: Axes, groups: Sequence[series.Group], names: Sequence[str], values: Spread) -> None:
    """A row for each name, the best at the top."""
    known = [(group.line, spread) for group in groups if (spread := series.mean_and_spread(values(group)))]
    known.sort(key=lambda entry: -entry[1][0])
    for place, (_, (mean, spread)) in enumerate(known):
        panel.errorbar(mean, place, xerr=spread or None, color="C0", marker="o", ms=5, capsize=2)
    panel.set_yticks(range(len(known)), [name or "all" for name, _ in known], fontsize=8)
    panel.set_ylim(-0.6, max(len(known), len(names)) - 0.4)


def _tell_lines(panel: Axes, axes: series.Axes) -> None:
    if panel.get_legend_handles_labels()[0]:
        title = axes.lines[0] if len(axes.lines) == 1 else None
        panel.legend(frameon=False, fontsize=8, title=title, title_fontsize=8)
