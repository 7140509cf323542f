"""A sweep: its points, what they differ in, and how its runs stand to a baseline's.

The points are a product that the command line spells out, or what a file's `get_sweep()` says.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from experiments.cli import program
from experiments.studies import results, runs
from experiments.studies.results import SEED

STEPS = "train.steps"
Row = Mapping[str, Any]  # a point, or a run: its settings, and its figures


class Sweep(NamedTuple):
    """The points of a grid, in order, and the settings of the baseline among them, if there is one."""

    points: list[dict[str, Any]]
    baseline: dict[str, Any] | None = None


def load(argument: str, baseline: str | None = None) -> Sweep:
    """The grid that `--sweep` and `--baseline` ask for.

    Raises:
      UsageError: the text is neither a grid nor a file with `get_sweep`, the function knows no such argument
        or names no point, two points are alike, or none has the baseline's settings.
    """
    if is_product(argument):
        sweep = Sweep(_product(argument))
    else:
        path = argument.partition(":")[0]
        named = getattr(program.load_module(path, "sweep"), "BASELINE", None)
        sweep = Sweep(program.load_and_call(argument, "get_sweep", "sweep"), named)
    if not sweep.points:
        raise program.UsageError(f"sweep: {argument}: names no point")
    if baseline:
        sweep = sweep._replace(baseline=dict(_setting(text, "baseline") for text in baseline.split(";")))
    if sweep.baseline and not any(is_of(point, sweep.baseline) for point in sweep.points):
        settings = ";".join(f"{name}={value}" for name, value in sweep.baseline.items())
        raise program.UsageError(f"baseline: no point of the sweep has {settings}")
    name, count = collections.Counter(map(point_name, sweep.points)).most_common(1)[0]
    if count > 1:
        raise program.UsageError(f"sweep: {count} of its points are {name}")
    return sweep


def is_product(argument: str) -> bool:
    """Whether the text spells the grid out, and names no file."""
    path = argument.partition(":")[0]
    return not path.endswith(".py") or "=" in path


def with_settings(sweep: Sweep, given: Sequence[tuple[str, Any]]) -> Sweep:
    """The sweep with these settings for all its points; raises UsageError for one in which they differ."""
    settings = dict(given)
    for name in settings:
        if len({str(point.get(name)) for point in sweep.points}) > 1:
            raise program.UsageError(
                f"config.{name}: is set for all points of the sweep, but they differ in it"
            )
    points = [{name: settings.get(name, value) for name, value in p.items()} for p in sweep.points]
    return sweep._replace(points=points)


def point_name(point: Mapping[str, Any]) -> str:
    """A folder name for the point."""
    return runs.folder_name(",".join(f"{name}={value}" for name, value in point.items()))


def _product(text: str) -> list[dict[str, str]]:
    axes = []
    for axis in filter(None, text.split(";")):
        name, values = _setting(axis, "sweep")
        apart = re.split(r",(?![^(]*\))", values)  # not at the commas of a tuple
        axes.append([(name, value.strip()) for value in apart])
    if not axes:
        raise program.UsageError(f"sweep: {text!r} is not of the form setting=value,value")
    return [dict(point) for point in itertools.product(*axes)]


def _setting(text: str, flag: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        form = "setting=value,value" if flag == "sweep" else "setting=value"
        raise program.UsageError(f"{flag}: {text!r} is not of the form {form}")
    return name.strip(), value.strip()


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


def place(frame: pd.DataFrame, sweep: Sweep) -> None:
    """Adds to a results table of the sweep's runs

    line, x: the place in the figure; runs that differ in their seed alone share it.
    gap: by how much of the baseline its held-out loss is above it: 0.02 is 2%; NaN where that is not known.
    match: with what part of its tokens the baseline has its held-out loss: 0.8 is 80%; NaN likewise.
    """
    axes, rows = axes_of(sweep.points), [_settings(row) for row in frame.to_dict("records")]
    frame["line"] = [line_of(row, axes) for row in rows]
    frame["x"] = [number(row.get(axes.x)) for row in rows]
    if not sweep.baseline:
        return
    keys = _baseline_keys(rows, sweep, axes)
    of_baseline = [is_of(row, sweep.baseline) for row in rows]
    own = [key if found else None for key, found in zip(keys, of_baseline, strict=True)]
    frame["gap"] = results.over_baseline(frame.eval_loss, own, keys) - 1
    keys = _baseline_keys(rows, sweep, axes, apart=STEPS)
    known = dict(list(frame[of_baseline].groupby(pd.Series(keys)[of_baseline])))
    match = [
        _match(run, known[key]) if key in known else math.nan
        for (_, run), key in zip(frame.iterrows(), keys, strict=True)
    ]
    if any(part != 1 for part in match if not math.isnan(part)):  # else there is one length of it
        frame["match"] = match


def _settings(row: Row) -> Row:
    """Without settings that the run's point does not name, which a table has as NaN."""
    return {
        name: value for name, value in row.items() if not (isinstance(value, float) and math.isnan(value))
    }


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


def _baseline_keys(rows: Sequence[Row], sweep: Sweep, axes: Axes, apart: str | None = None) -> list[str]:
    """What the baseline's run of each run has in common with it.

    The seed, and its settings wherever the baseline's differ, also those of runs that have failed. But not
    those that follow from others, as the baseline's own best rate at each size. `apart`: a setting in which
    they may differ from the run.
    """
    baseline = sweep.baseline or {}
    ways = [name for name in axes.settings if name not in (*baseline, apart)]
    several = _differing([point for point in sweep.points if is_of(point, baseline)], ways)
    return ["\n".join(_text(row, name) for name in (SEED, *several)) for row in rows]


def _match(run: pd.Series, baseline: pd.DataFrame) -> float:
    """Between two lengths of the baseline its loss goes along a straight line, both in logarithms.

    NaN for a loss that is not between those of two lengths in turn. The lengths are of a model as large as
    the run's.
    """
    alike = baseline.num_params.isna() if pd.isna(run.num_params) else baseline.num_params == run.num_params
    known = baseline[alike][["tokens_total", "eval_loss"]].dropna().sort_values("tokens_total")
    for (fewer, worse), (more, better) in itertools.pairwise(known.to_numpy().tolist()):
        if better <= run.eval_loss <= worse and better < worse:
            part = math.log(worse / run.eval_loss) / math.log(worse / better)
            return fewer * (more / fewer) ** part / run.tokens_total
    return math.nan


def _text(row: Row, name: str) -> str:
    """The text of a setting; of a batch that of the global one, which differs from it by the learners."""
    value = row.get(name)
    batch, learners = number(value), number(row.get("sync.num_learners"))
    return str(batch * learners) if name == "train.batch_size" and batch and learners else str(value)
