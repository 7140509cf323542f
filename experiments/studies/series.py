"""What a sweep shows: its runs by point whatever their seed, along an axis, and against a baseline."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

SEED = "seed"
STEPS = "train.steps"
Row = Mapping[str, Any]  # a run: its settings, and the figures of its summary


@dataclasses.dataclass(frozen=True)
class Axes:
    """How the points of a sweep are laid out: what they differ in, apart from the seed.

    Attributes:
      x: the first setting that is a number in every point; None where there is none.
      lines: the other settings; a line for each combination of their values.
    """

    x: str | None
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Group:
    """The runs of one point: a place on the axis, a line, and the row of each seed."""

    line: str
    x: float | None
    rows: tuple[Row, ...]

    def values(self, measure: str) -> list[float]:
        """The figure of each run that has it."""
        return [row[measure] for row in self.rows if row.get(measure) is not None]


def axes_of(points: Sequence[Row], settings: Sequence[str]) -> Axes:
    """The axes of a sweep over these settings.

    A setting with one value says nothing; nor does one that follows from an earlier one, as the batch of a
    learner from the number of learners at an equal global batch.
    """
    kept: list[str] = []
    for name in settings:
        values = [str(point.get(name)) for point in points]
        if name == SEED or len(set(values)) < 2:
            continue
        if not any(_follows(values, [str(point.get(other)) for point in points]) for other in kept):
            kept.append(name)
    x = next((name for name in kept if all(number(point.get(name)) is not None for point in points)), None)
    return Axes(x, tuple(name for name in kept if name != x))


def groups(rows: Sequence[Row], axes: Axes) -> list[Group]:
    """The rows by point, in the order of their first rows."""
    found: dict[tuple[str, float | None], list[Row]] = {}
    for row in rows:
        found.setdefault((label(row, axes), number(row[axes.x]) if axes.x else None), []).append(row)
    return [Group(line, x, tuple(members)) for (line, x), members in found.items()]


def label(point: Row, axes: Axes) -> str:
    """The name of the line that a point is on; the value alone where only one setting tells lines apart."""
    known = [name for name in axes.lines if name in point]
    if len(axes.lines) == 1:
        return ", ".join(str(point[name]) for name in known)
    return ", ".join(f"{name.rpartition('.')[2]}={point[name]}" for name in known)


def gaps(group: Group, rows: Sequence[Row], axes: Axes, baseline: Row, measure: str) -> list[float]:
    """By how much of the baseline the figure of each run is above it, seed by seed: 0.02 is 2%.

    A run is held against the baseline's run of its own seed that has the same settings wherever the
    baseline's runs differ among themselves. Runs without one, or with several, are left out.
    """
    found = []
    for row in group.rows:
        peers = [peer for peer in counterparts(row, rows, axes, baseline) if peer.get(measure)]
        if len(peers) == 1 and row.get(measure) is not None:
            found.append(row[measure] / peers[0][measure] - 1)
    return found


def tokens_to_match(group: Group, rows: Sequence[Row], axes: Axes, baseline: Row) -> list[float]:
    """With what part of its tokens the baseline has each run's held-out loss, seed by seed: 0.8 is 80%.

    Between two lengths of the baseline its loss goes along a straight line, both in logarithms. A loss that
    is not between those of two lengths in turn is left out, as is a baseline of one length. All lengths are
    of a model as large as the run's.
    """
    found = []
    for row in group.rows:
        peers = counterparts(row, rows, axes, baseline, apart=STEPS)
        peers = [peer for peer in peers if peer.get("num_params") == row.get("num_params")]
        curve = sorted((p["tokens_total"], p["eval_loss"]) for p in peers if p.get("eval_loss"))
        for (fewer, worse), (more, better) in itertools.pairwise(curve):
            if row.get("eval_loss") and better <= row["eval_loss"] <= worse and better < worse:
                part = math.log(worse / row["eval_loss"]) / math.log(worse / better)
                found.append(fewer * (more / fewer) ** part / row["tokens_total"])
                break
    return found


def counterparts(
    row: Row, rows: Sequence[Row], axes: Axes, baseline: Row, apart: str | None = None
) -> list[Row]:
    """The baseline's runs of a run's seed, and of its settings but `apart` where the baseline has several."""
    references = [peer for peer in rows if is_of(peer, baseline)]
    several = [
        name
        for name in (*axes.lines, *([axes.x] if axes.x else []))
        if name not in (*baseline, apart) and len({_setting(peer, name) for peer in references}) > 1
    ]
    return [
        peer
        for peer in references
        if all(_setting(peer, name) == _setting(row, name) for name in (SEED, *several))
    ]


def _setting(row: Row, name: str) -> str:
    """The text of a setting; of a batch that of the global one, which differs from it by the learners."""
    value = row.get(name)
    batch, learners = number(value), number(row.get("sync.num_learners"))
    return str(batch * learners) if name == "train.batch_size" and batch and learners else str(value)


def is_of(row: Row, settings: Row) -> bool:
    """Whether the row has these settings."""
    return all(str(row.get(name)) == str(value) for name, value in settings.items())


def mean_and_spread(values: Sequence[float]) -> tuple[float, float] | None:
    """Mean and standard deviation, which is 0 of one value; None of none."""
    if not values:
        return None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def number(value: Any) -> float | None:
    """The value as a number, also from a command line's text; None if it is none, or is true or false."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _follows(values: Sequence[str], others: Sequence[str]) -> bool:
    """Whether each of the other setting's values comes with one value of this setting."""
    return len(set(zip(others, values, strict=True))) == len(set(others))
