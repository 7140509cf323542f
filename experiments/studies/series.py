"""What a sweep shows: its runs by point whatever their seed, along an axis, and against a baseline."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SEED = "seed"
STEPS = "train.steps"
Row = Mapping[str, Any]  # a run: its settings, and the figures of its summary


@dataclasses.dataclass(frozen=True)
class Axes:
    """How the points of a sweep are laid out: what they differ in, apart from the seed."""

    x: str | None  # the first setting that is a number in every point; None where there is none
    lines: tuple[str, ...]  # the other settings; a line for each combination of their values

    @property
    def settings(self) -> tuple[str, ...]:
        """Those of the lines, then the axis."""
        return (*self.lines, *([self.x] if self.x else []))


def axes_of(points: Sequence[Row]) -> Axes:
    """The axes of a sweep over these points, of settings in their order.

    A setting with one value is left out, and so is one that follows from an earlier one, as the batch of a
    learner from the number of learners at an equal global batch.
    """
    kept = _differing(points, dict.fromkeys(name for point in points for name in point if name != SEED))
    x = next((name for name in kept if all(number(point.get(name)) is not None for point in points)), None)
    return Axes(x, tuple(name for name in kept if name != x))


def placed(rows: Sequence[Row], axes: Axes, baseline: Row | None, planned: Sequence[Row]) -> list[Row]:
    """The runs, each with

    line, x: its place in the figure; runs that differ in their seed alone share it.
    gap: by how much of the baseline its held-out loss is above it: 0.02 is 2%; None where that is not known.
    match: with what part of its tokens the baseline has its held-out loss: 0.8 is 80%; None likewise.

    `planned`: the points of the sweep, also those whose runs have failed: they tell what the baseline has
    several of.
    """
    gaps = matches = [None] * len(rows)
    if baseline:
        gaps = list(map(_gap, rows, _peers(rows, axes, baseline, planned)))
        matches = list(map(_match, rows, _peers(rows, axes, baseline, planned, apart=STEPS)))
    return [
        {**row, "line": line_of(row, axes), "x": number(row.get(axes.x)), "gap": gap, "match": match}
        for row, gap, match in zip(rows, gaps, matches, strict=True)
    ]


def points(runs: Iterable[Row]) -> dict[tuple[str, float | None], list[Row]]:
    """The runs of each point by its line and place, in the order of their first runs."""
    found: dict[tuple[str, float | None], list[Row]] = {}
    for run in runs:
        found.setdefault((run["line"], run["x"]), []).append(run)
    return found


def values(runs: Iterable[Row], name: str) -> list[float]:
    """The figure of each of the runs that has it."""
    return [run[name] for run in runs if run.get(name) is not None]


def line_of(point: Row, axes: Axes) -> str:
    """The name of the line that a point is on; the value alone if lines differ in one setting only."""
    known = [name for name in axes.lines if name in point]
    if len(axes.lines) == 1:
        return ", ".join(str(point[name]) for name in known)
    last = [name.rpartition(".")[2] for name in axes.lines]
    alone = {name: short for name, short in zip(axes.lines, last, strict=True) if last.count(short) == 1}
    return ", ".join(f"{alone.get(name, name)}={point[name]}" for name in known)


def is_of(row: Row, settings: Row) -> bool:
    """Whether the row has these settings."""
    return all(str(row.get(name)) == str(value) for name, value in settings.items())


def mean_and_spread(figures: Sequence[float]) -> tuple[float, float] | None:
    """Mean and standard deviation, which is 0 of one value; None of none."""
    if not figures:
        return None
    return statistics.fmean(figures), statistics.stdev(figures) if len(figures) > 1 else 0.0


def number(value: Any) -> float | None:
    """The value as a number, also from a command line's text; None if it is none, or is true or false."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _differing(rows: Sequence[Row], names: Iterable[str]) -> list[str]:
    """The settings in which the rows differ, without those that follow from one before them."""
    kept: dict[str, list[str]] = {}
    for name in names:
        values = [str(row.get(name)) for row in rows]
        follows = any(len({*zip(other, values, strict=True)}) == len({*other}) for other in kept.values())
        if len({*values}) > 1 and not follows:
            kept[name] = values
    return list(kept)


def _peers(
    rows: Sequence[Row], axes: Axes, baseline: Row, planned: Sequence[Row], apart: str | None = None
) -> list[list[Row]]:
    """For each run the baseline's of its seed, and of its settings wherever the baseline's differ.

    But not of those that follow from others, as the baseline's own best rate at each size. `apart`: a setting
    in which they may differ from the run.
    """
    references = [row for row in rows if is_of(row, baseline)]
    ways = [name for name in axes.settings if name not in (*baseline, apart)]
    several = _differing([point for point in planned if is_of(point, baseline)], ways)

    def key(row: Row) -> tuple[str, ...]:
        return tuple(_text(row, name) for name in (SEED, *several))

    by_key: dict[tuple[str, ...], list[Row]] = {}
    for row in references:
        by_key.setdefault(key(row), []).append(row)
    return [by_key.get(key(row), []) for row in rows]


def _gap(row: Row, peers: Sequence[Row]) -> float | None:
    """None for a run without a loss, or without one such run of the baseline."""
    losses = [peer["eval_loss"] for peer in peers if peer.get("eval_loss")]
    if len(losses) != 1 or row.get("eval_loss") is None:
        return None
    return row["eval_loss"] / losses[0] - 1


def _match(row: Row, peers: Sequence[Row]) -> float | None:
    """Between two lengths of the baseline its loss goes along a straight line, both in logarithms.

    None for a loss that is not between those of two lengths in turn. The lengths are of a model as large as
    the run's.
    """
    loss = row.get("eval_loss")
    curve = sorted(
        (peer["tokens_total"], peer["eval_loss"])
        for peer in peers
        if peer.get("eval_loss")
        and peer.get("tokens_total")
        and peer.get("num_params") == row.get("num_params")
    )
    for (fewer, worse), (more, better) in itertools.pairwise(curve):
        if loss and better <= loss <= worse and better < worse:
            part = math.log(worse / loss) / math.log(worse / better)
            return fewer * (more / fewer) ** part / row["tokens_total"]
    return None


def _text(row: Row, name: str) -> str:
    """The text of a setting; of a batch that of the global one, which differs from it by the learners."""
    value = row.get(name)
    batch, learners = number(value), number(row.get("sync.num_learners"))
    return str(batch * learners) if name == "train.batch_size" and batch and learners else str(value)
