"""Figures: shared style, atomic writes, and `loss.png` of a run."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ddiloco.telemetry.files import replacing
from ddiloco.telemetry.scalars import as_float
from ddiloco.telemetry.state import RunState

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@contextlib.contextmanager
def figure_at(path: pathlib.Path, width: float, height: float, dpi: int = 130) -> Iterator[Figure]:
    """An empty figure, in inches; at the end of the `with` block it is written to `path` as PNG.

    Raises OSError where the disk refuses; no half-written figure is left.
    """
    # Matplotlib takes a second to import; only programs that draw should wait for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    yield figure
    with replacing(path) as new:
        FigureCanvasAgg(figure).print_png(new)


def colours(count: int) -> list[tuple[float, ...]]:
    """`count` colours (red, green, blue) that are easy to distinguish."""
    from matplotlib import colormaps

    table = colormaps["tab10"] if count <= 10 else colormaps["turbo"].resampled(count)
    return [table(place)[:3] for place in range(count)]


def dress(axes: Axes, grid: str = "both") -> None:
    """A light grid along "x", "y" or "both", behind what is drawn, and no frame above and on the right."""
    axes.grid(axis=grid, alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["right", "top"]].set_visible(False)


def plot_loss(path: pathlib.Path, state: RunState) -> None:
    """Writes the figure, without the curves that a run does not have; raises OSError as `figure_at`."""
    with figure_at(path, 9, 5.2, dpi=160) as figure:
        axes = figure.add_subplot()
        of_learner = _draw_learners(axes, state)
        _draw_evaluations(axes, state)
        _draw_marks(axes, state, of_learner)
        _dress(axes, state)


def _draw_learners(axes: Axes, state: RunState) -> dict[int, tuple[float, ...]]:
    learners = sorted(state.taking_part())
    of_learner = dict(zip(learners, colours(len(learners)), strict=True))
    for learner in learners:
        if not state.learners[learner].loss:
            continue
        steps, losses = state.learners[learner].loss.points()
        label = f"learner {learner}, training" if len(learners) <= 10 else None
        marker = "." if np.isfinite(losses).sum() < 3 else None
        smooth = _smoothed(losses)
        axes.plot(steps, smooth, color=of_learner[learner], lw=0.9, alpha=0.8, label=label, marker=marker)
    return of_learner


def _draw_evaluations(axes: Axes, state: RunState) -> None:
    if state.evaluations:
        axes.plot(
            [record.step for record in state.evaluations],
            [as_float(record.loss) for record in state.evaluations],
            color="black",
            lw=2.2,
            marker="o",
            markersize=5,
            markeredgecolor="white",
            label="global model, held-out",
            zorder=5,
        )


def _draw_marks(axes: Axes, state: RunState, of_learner: dict[int, tuple[float, ...]]) -> None:
    """A cross on the axis where a learner was lost, a triangle where it rejoined, in its colour."""
    looks = {False: ("x", "a learner is lost"), True: ("^", "a learner is back")}
    for rejoined, (marker, label) in looks.items():
        marks = [(step, learner) for step, learner, returned in state.marks if returned is rejoined]
        for step, learner in marks:
            colour = of_learner.get(learner, "grey")
            axes.axvline(step, color=colour, lw=0.7, alpha=0.35, ls="-" if rejoined else ":", zorder=1)
        if marks:
            axes.scatter(
                [step for step, _ in marks],
                [0.025] * len(marks),
                transform=axes.get_xaxis_transform(),
                color=[of_learner.get(learner, "grey") for _, learner in marks],
                marker=marker,
                s=42,
                zorder=6,
                clip_on=False,
            )
            axes.scatter([], [], color="0.3", marker=marker, s=42, label=label)


def _dress(axes: Axes, state: RunState) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    info = state.info
    parameters = EngFormatter(places=1, sep="")(info.num_params)
    axes.set_title(f"{info.algorithm}, M = {info.num_learners}, {parameters} parameters", fontsize=12)
    axes.set_xlabel("global step")
    axes.set_ylabel("loss (nats/token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    dress(axes)
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        axes.legend(frameon=False, fontsize=9)
    else:
        nothing = "steps were taken without a loss" if state.step else "no step was taken"
        axes.text(0.5, 0.5, nothing, transform=axes.transAxes, ha="center", color="0.5")
    if state.step and state.tokens:
        rate = state.tokens / state.step
        top = axes.secondary_xaxis("top", functions=(lambda s: s * rate, lambda t: t / rate))
        top.set_xlabel("tokens, all learners (approximate)", fontsize=9, color="0.4")
        top.xaxis.set_major_formatter(EngFormatter(sep=""))
        top.tick_params(labelsize=8, colors="0.4")
        top.spines["top"].set_color("0.7")


def _smoothed(values: list[float]) -> np.ndarray:
    """Running means over about 2% of the curve, centred; NaN where no value in the window is finite."""
    given = np.asarray(values)
    finite = np.isfinite(given)
    window = np.ones(2 * (len(given) // 100) + 1)
    sums = np.convolve(np.where(finite, given, 0.0), window, "same")
    counts = np.convolve(finite, window, "same")
    return np.divide(sums, counts, out=np.full(len(given), np.nan), where=finite)
