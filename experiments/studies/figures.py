"""The figures of studies, of a few forms: curves, lines along an axis, named rows, stacked shares, lanes."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from ddiloco.telemetry.plots import colours, dress, figure_at
from experiments.studies import results, sweeps
from experiments.studies.agreement import ALL
from experiments.studies.chaos.lanes import lane
from experiments.studies.goodput.systems import published

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from experiments.studies.chaos.run_files import Trace
    from experiments.studies.goodput.simulator import Cell

Rows = Sequence[Mapping[str, Any]]
Panel = Callable[["Axes"], None]

_MEASURES = {"loss": "held-out loss (nats/token)", "accuracy": "held-out accuracy"}
_SKIPPED = 0.1  # share of a curve's start that may lie above the picture: the fall from the initial loss
_MANY = 6  # lines of a panel above which the legend stands below the panels
_LETTER = 0.06  # inches that a letter of a row's name takes
_WIDE = 8.0  # the largest over the smallest place from which on an axis is logarithmic
_MIN_SHARE = 5e-4  # of the time that a cause took, to be shown
_SMALL = {"frameon": False, "fontsize": 8}  # legends


def _draw(
    path: pathlib.Path, lines: Sequence[Sequence[Panel]], width: float, height: float, below: bool = False
) -> None:
    """Writes lines of panels, of this many inches in all; `below`: the first panel's legend is below them."""
    with figure_at(path, width, height, dpi=120) as figure:
        grid = figure.add_gridspec(max(1, len(lines)), math.lcm(*map(len, lines)) if lines else 1)
        for i, line in enumerate(lines):
            share = grid.ncols // len(line)
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


def _pairs(panels: Sequence[Panel]) -> list[Sequence[Panel]]:
    return [panels[i : i + 2] for i in range(0, len(panels), 2)]


# The forms.


def _curves(axes: Axes, frame: pd.DataFrame, by: str, x: str, y: str, looks: Mapping[str, Any]) -> None:
    """A curve for each seed, of one look for each name."""
    for name, own in frame.groupby(by, sort=False):
        look = dict(looks[name])
        for _, curve in own.dropna(subset=[x, y]).groupby("seed", sort=False):
            axes.plot(curve[x], curve[y], **look)
            look["label"] = None


def _lines(
    axes: Axes, frame: pd.DataFrame, line: str, x: str, y: str, title: str, bars: str | None = None
) -> None:
    """A line for each name, with bars of one standard deviation; of one at a single place, a level.

    `bars`: the column that has the bars, where runs are means already.
    """
    groups = frame.groupby([line, x], sort=True)
    means, spread = groups[y].mean(), groups[y].std() if bars is None else groups[bars].first()
    one_point, places = len(means) == 1, set()
    for i, name in enumerate(frame[line].unique()):
        places |= set(means[name].index) if len(means[name]) > 1 else set()
        known = means[name].dropna()
        look = {"color": f"C{i % 10}", "label": name}
        if known.empty:
            continue
        if len(means[name]) == 1 and not one_point:
            axes.axhline(known.iloc[0], ls="--", lw=1.2, **look)
        else:
            look |= {"marker": "osD^v"[i // 10 % 5], "ms": 4, "capsize": 2}
            axes.errorbar(known.index, known, yerr=spread[name][known.index].fillna(0.0), **look)
    ordered = sorted(places)
    if ordered and ordered[0] > 0 and ordered[-1] >= _WIDE * ordered[0]:
        axes.set_xscale("log", base=2)
    if 1 < len(ordered) <= 8:
        axes.set_xticks(ordered, [f"{place:g}" for place in ordered])
        axes.minorticks_off()
    axes.set_xlabel(x)
    axes.set_ylabel(title)
    dress(axes)


def _rows(
    axes: Axes, frame: pd.DataFrame, by: str, figure: str, title: str, best_first: bool = False
) -> None:
    """A row for each name: a dot for each run, and mean and standard deviation."""
    groups = frame.groupby(by, sort=False)[figure]
    means, spread = groups.mean(), groups.std()
    known = means.dropna().sort_values() if best_first else means
    for place, (name, colour) in enumerate(zip(known.index, colours(len(known)), strict=True)):
        own = frame[frame[by] == name][figure]
        axes.scatter(own, [place] * len(own), color=colour, alpha=0.4, s=20)
        bar = spread[name] if spread[name] > 0 else None
        axes.errorbar(known[name], place, xerr=bar, color=colour, marker="|", ms=14, mew=2, capsize=2)
    _name_rows(axes, known.index, title)


def _stacked(axes: Axes, shares: pd.DataFrame, title: str) -> None:
    """A row for each name, a part of its bar for each column, in percent."""
    from matplotlib import colormaps

    left = 100 * (shares.cumsum(axis=1) - shares)
    for i, part in enumerate(shares):
        colour = "0.35" if part == "goodput" else colormaps["Set2"](i % 8)
        name = part.replace("_", " ")
        axes.barh(range(len(shares)), 100 * shares[part], left=left[part], color=colour, label=name)
    axes.set_xlim(0, 100)
    _name_rows(axes, shares.index, title)


def _name_rows(axes: Axes, names: Iterable[str], title: str) -> None:
    """A panel whose rows have names, the first at the top."""
    known = [textwrap.fill(str(name) or "all", 40) for name in names]
    axes.set_yticks(range(len(known)), known, fontsize=8)
    axes.set_ylim(max(1, len(known)) - 0.4, -0.6)
    axes.set_xlabel(title)
    dress(axes, "x")


def _logarithmic(axes: Axes, places: Iterable[float], title: str) -> None:
    """An axis of numbers that are far apart, these marked."""
    from matplotlib.ticker import EngFormatter, NullFormatter, NullLocator

    axes.set_xscale("log")
    axes.set_xticks(sorted(places))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(title)
    _legend(axes)


# Comparisons and sweeps.


def draw_comparison(path: pathlib.Path, frame: pd.DataFrame) -> None:
    """Of a results table with labels, line by line: scores by tokens, time and bytes; where the time went."""
    scores = [
        {"label": run.label, "seed": run.seed, **score}
        for run in frame[frame.finished].itertuples()
        for score in run.eval_history
    ]
    history, lines = pd.DataFrame(scores), list[list[Panel]]()
    across = {
        "tokens": "tokens, all learners",
        "seconds": results.clock_of(frame),
        "bytes": "bytes over links",
    }
    for y, title in _MEASURES.items():
        curves = [
            functools.partial(_draw_curves, history, frame.label.unique(), x, y, across[x])
            for x in across
            if len(_curve(history, x, y))
        ]
        if not curves and frame[f"eval_{y}"].notna().any():
            curves = [lambda axes, y=y, title=title: _rows(axes, frame, "label", f"eval_{y}", title)]
        lines.append(curves)
    lines.append([])
    if frame.goodput.notna().any():
        lines[-1].append(functools.partial(_draw_shares, frame))
    if frame.time_ratio.notna().any():
        title = f"{results.clock_of(frame)} to the end, relative to {frame.label.iloc[0]}"
        lines[-1].append(lambda axes: _rows(axes, frame, "label", "time_ratio", title))
    lines = [line for line in lines if line]
    width = 13 if any(len(line) > 1 for line in lines) else 8
    _draw(path, lines, width, max(1, len(lines)) * max(3.6, 1.4 + 0.42 * frame.label.nunique()))


def _curve(history: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """The scores that make curves: more than a beginning and an end; against bytes, once there were any."""
    if not {x, y} <= set(history.columns):
        return history.iloc[:0]
    known = history.dropna(subset=[x, y])
    known = known[known[x] > 0] if x == "bytes" else known
    return known[known.groupby(["label", "seed"])[x].transform("nunique") > 2]


def _draw_curves(
    history: pd.DataFrame, labels: Sequence[str], x: str, y: str, title: str, axes: Axes
) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, PercentFormatter

    known = _curve(history, x, y)
    looks = {
        label: {"color": colour, "label": label, "lw": max(1.2, 3.0 - 0.5 * i), "alpha": 0.8}
        for i, (label, colour) in enumerate(zip(labels, colours(len(labels)), strict=True))
    }  # of two curves that are one, both are seen
    _curves(axes, known, "label", x, y, looks)
    if y == "loss":
        begun = known[x] >= _SKIPPED * known.groupby("label")[x].transform("max")
        lowest, highest = known[y].min(), known[begun][y].max()
        margin = 0.06 * (highest - lowest) or 0.1
        axes.set_ylim(lowest - margin, highest + margin)
    else:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    if x == "bytes":
        axes.set_xscale("log")  # algorithms are a factor of ten and more apart
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 30 * low else (1,)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel(title)
    axes.set_ylabel(_MEASURES[y])
    if x == "tokens":
        _legend(axes)
    dress(axes)


def _draw_shares(frame: pd.DataFrame, axes: Axes) -> None:
    """Goodput and what the rest of the time went to, with the paper's goodput where there is one."""
    done = frame[frame.goodput.notna()]
    lost = pd.DataFrame(done["lost"].tolist(), done.index).fillna(0.0)
    lost = lost[[cause for cause in lost if (lost[cause] >= _MIN_SHARE).any()]]
    shares = pd.concat([done.goodput, lost], axis=1).groupby(done.label, sort=False).mean()
    _stacked(axes, shares, "share of the chips' time (%)")
    for place, label in enumerate(shares.index):
        paper = done[done.label == label].paper.iloc[0]
        if "goodput" in paper:
            look = {"color": "white", "edgecolor": "black", "marker": "D", "s": 34, "zorder": 5}
            axes.scatter(100 * paper["goodput"], place, **look, clip_on=False)
    _legend(axes, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)


def draw_sweep(path: pathlib.Path, frame: pd.DataFrame, sweep: sweeps.Sweep) -> None:
    """Losses, and accuracies and gaps if there are any: lines along the sweep's axis, or point by point."""
    layout, shown = sweeps.axes_of(sweep.points), frame.assign(gap=100 * frame.gap)
    panels = {"eval_loss": _MEASURES["loss"]}
    if frame.eval_accuracy.notna().any():
        panels["eval_accuracy"] = _MEASURES["accuracy"]
    if sweep.baseline:
        name = ", ".join(str(value) for value in sweep.baseline.values()).replace("_", "-")
        panels["gap"] = f"loss above {name} (%)"
    lines = frame.line.nunique()
    below = layout.x is not None and lines > _MANY
    height = 4.2 if layout.x else 1.4 + 0.34 * lines
    height += 0.2 * math.ceil(lines / len(panels)) if below else 0.0
    names = 0.0 if layout.x else _LETTER * max(map(len, frame.line), default=0)

    def draw(figure: str, title: str, axes: Axes) -> None:
        if not frame[figure].notna().any():
            axes.text(0.5, 0.5, "no run has one", transform=axes.transAxes, ha="center", color="0.5")
        if layout.x is None:
            _rows(axes, shown, "line", figure, title, best_first=True)
            return
        _lines(axes, shown, "line", "x", figure, title)
        axes.set_xlabel(layout.x)
        if layout.lines and not below:
            _legend(axes, title=layout.lines[0] if len(layout.lines) == 1 else None, title_fontsize=8)

    line = [functools.partial(draw, figure, title) for figure, title in panels.items()]
    _draw(path, [line], 1 + (5.2 + names) * len(panels), height, below)


# Scaling laws.


def draw_scaling(path: pathlib.Path, found: Mapping[str, Any]) -> None:
    """The figure of a scaling study: losses and their laws, errors at the held-out size, best values."""
    losses, laws = pd.DataFrame(found["losses"]), found["laws"]
    most = losses[losses.tokens == losses.groupby("params").tokens.transform("max")]
    alone = {
        law["learners"][0]: law for law in laws if len(law["learners"]) == 1 and law["formula"] == "A N^alpha"
    }
    title = "loss at the most tokens of each size; lines: A N^alpha"
    panels: list[Panel] = [lambda axes: _draw_laws(axes, most, "loss", alone, title)]
    held_out = [law for law in laws if law.get("held_out")]
    if held_out:
        errors = pd.DataFrame(
            [{"law": law["name"], "error": 100 * law["held_out"]["error"]} for law in held_out]
        )
        title_of_errors = "mean error (%) at the largest size, of laws that never saw it"
        panels.append(lambda axes: _rows(axes, errors, "law", "error", title_of_errors))
    for entry in found["hyperparameters"]:
        values = pd.DataFrame(entry["values"], columns=["params", "learners", "value"])
        named = dict.fromkeys(values.learners.unique(), entry)
        title_of_best = f"best {entry['title']}"
        panels.append(
            functools.partial(_draw_laws, values=values, y="value", laws=named, title=title_of_best)
        )
    lines = _pairs(panels)
    _draw(path, lines, 13 if len(panels) > 1 else 7, 4.4 * len(lines))


def _draw_laws(
    axes: Axes, values: pd.DataFrame, y: str, laws: Mapping[int, Mapping[str, Any]], title: str
) -> None:
    """Values by size, a colour for each number of learners, and the power law through them, if any."""
    for i, (learners, own) in enumerate(values.groupby("learners")):
        look = {"color": f"C{i}", "label": results.learners_name(learners)}
        bars = own.spread.astype(float).fillna(0.0) if "spread" in own else None
        axes.errorbar(own.params, own[y], yerr=bars, fmt="o", ms=4, capsize=2, **look)
        law = laws.get(learners)
        if law and not law["problem"]:
            named, sizes = law["parameters"], own.params.sort_values()
            scale = named["A"] * max(1, learners) ** named.get("beta", 0.0)
            axes.plot(sizes, scale * sizes ** named.get("alpha", 0.0), color=f"C{i}", lw=1)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_title(title, fontsize=10)
    dress(axes)
    _logarithmic(axes, values.params.unique(), "parameters")


# Agreement of learners.


def draw_agreement(path: pathlib.Path, frame: pd.DataFrame) -> None:
    """Cosines between learners over the run, a line for each label; and by kind of tensor, a dot for each."""
    of_seed = frame.groupby(["label", "kind", "part", "seed"], sort=False).cosine.mean().reset_index()
    whole = of_seed[of_seed.kind == ALL].rename(columns={"part": "share of the run"})
    kinds = frame[frame.kind != ALL].groupby(["kind", "label"], sort=False).cosine.mean()

    def over_the_run(axes: Axes) -> None:
        _lines(axes, whole, "label", "share of the run", "cosine", "cosine between learners")
        axes.set_xscale("linear")

    def by_kind(axes: Axes) -> None:
        names = sorted(kinds.index.unique("kind"))
        for i, label in enumerate(frame.label.unique()):
            own = kinds.xs(label, level="label")
            axes.plot(own, [names.index(kind) for kind in own.index], "o", color=f"C{i}", ms=5)
        _name_rows(axes, names, "mean cosine by kind of tensor")

    panels: list[Panel] = [over_the_run, by_kind]
    _draw(path, [panels if len(kinds) else panels[:1]], 12, 4.6, below=True)


# Averages of parameters.


def draw_averages(path: pathlib.Path, points: pd.DataFrame, metrics: Mapping[str, str]) -> None:
    """Scores by step, a curve for each name; a panel for each of these metrics, by their titles."""

    def look(name: str) -> dict[str, Any]:
        kind, _, number = name.partition(" ")
        if kind == "learner":
            return {"color": "0.6", "lw": 1, "label": "learners" if number == "0" else None}
        width = 1.4 if name.endswith(" rounds") else 2.2
        return {"lw": width, "ls": "-" if name == "global model" else "--", "label": name}

    def draw(metric: str, axes: Axes) -> None:
        # The initial loss would hide all that follows.
        shown = points[points.step > 0] if metric == "loss" else points
        _curves(axes, shown, "name", "step", metric, {name: look(name) for name in points.name.unique()})
        axes.set_xlabel("step")
        axes.set_title(metrics[metric], fontsize=10)
        dress(axes)
        if metric == "loss":
            _legend(axes)

    lines = _pairs([functools.partial(draw, metric) for metric in metrics])
    _draw(path, lines, 6.5 * len(lines[0]), 4 * len(lines))


# Simulated goodput.


def draw_goodput(stem: pathlib.Path, cells: Sequence[Cell]) -> list[pathlib.Path]:
    """Writes STEM_goodput.png, STEM_attribution.png, STEM_uptime.png; returns their paths."""
    frame = pd.DataFrame([{**cell.lost, **dataclasses.asdict(cell), "system": cell.label} for cell in cells])
    figures = ["goodput", "ci95", "uptime", "quorum_uptime"]
    percent = frame.assign(**{name: 100 * frame[name].astype(float) for name in figures})
    causes = [cause for cause in cells[0].lost if (frame[cause] >= _MIN_SHARE).any()]

    def goodput(axes: Axes) -> None:
        _lines(axes, percent, "system", "num_chips", "goodput", "goodput (%)", bars="ci95")
        paper = [(cell.num_chips, published(cell.label, cell.num_chips)) for cell in cells]
        if known := [point for point in paper if point[1]]:
            axes.scatter(
                *zip(*known, strict=True), color="0.3", marker="x", s=60, zorder=5, label="the paper"
            )

    def uptime(axes: Axes) -> None:
        quorum = percent[percent.quorum_uptime.notna()]
        of_quorum = quorum.assign(uptime=quorum.quorum_uptime, system=quorum.system + ", a quorum")
        both = pd.concat([percent, of_quorum])
        _lines(axes, both, "system", "num_chips", "uptime", "uptime (%)")

    def by_chips(panel: Panel, axes: Axes) -> None:
        panel(axes)
        axes.set_ylim(0, 103)
        _logarithmic(axes, frame.num_chips.unique(), "chips")

    def attribution(count: int, own: pd.DataFrame, axes: Axes) -> None:
        _stacked(axes, own.set_index("system")[causes], "chip time lost (%)")
        axes.set_title(f"{count:,} chips", fontsize=9)

    pictures: dict[str, list[Panel]] = {
        "goodput": [functools.partial(by_chips, goodput)],
        "attribution": [functools.partial(attribution, *one) for one in frame.groupby("num_chips")],
        "uptime": [functools.partial(by_chips, uptime)],
    }
    paths = [stem.with_name(f"{stem.name}_{name}.png") for name in pictures]
    for path, panels in zip(paths, pictures.values(), strict=True):
        _draw(path, [panels], 9 + 2 * (len(panels) - 1), 5.2, below=len(panels) > 1 and bool(causes))
    return paths


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
    places = {target: place for place, target in enumerate(trace.marks)}
    spans = [(places[target], span) for target in trace.marks for span in lane(trace, target)]
    start = min((trace.marks[m][0].time for m in trace.learners if trace.marks[m]), default=0.0)
    with figure_at(path, 12, 1.6 + 0.55 * len(places)) as figure:
        axes = figure.add_subplot()
        for state, colour in _STATES.items():
            own = [(place, span) for place, span in spans if span.state == state]
            lefts, widths = [s.start - start for _, s in own], [s.end - s.start for _, s in own]
            rows = [place for place, _ in own]
            axes.barh(rows, widths, 0.6, lefts, color=colour, lw=0, label=state if own else None)
        for kind, (marker, colour) in _FAULTS.items():
            struck = [blow for blow in trace.blows if blow.kind == kind and blow.target in places]
            at = [places[blow.target] - 0.4 for blow in struck]
            times = [blow.time - start for blow in struck]
            look = {"marker": marker, "color": colour, "s": 16, "lw": 1.2, "zorder": 3}
            axes.scatter(times, at, label=kind if struck else None, **look)
            for blow, place in zip(struck, at, strict=True):
                if kind == "partition" and blow.until is not None:
                    axes.plot([blow.time - start, blow.until - start], [place, place], color=colour, lw=1.5)
        axes.set_yticks(list(places.values()), list(places))
        axes.invert_yaxis()
        axes.set_xlabel("seconds")
        axes.set_xlim(left=-1)
        axes.spines[["right", "top", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        figure.legend(loc="outside lower center", ncols=9, **_SMALL)
