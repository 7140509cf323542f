"""The points of a sweep: a product that the command line spells out, or what a file's `get_sweep()` says."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.cli import program
from experiments.studies import runs, series


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
        sweep = Sweep(program.call(argument, "get_sweep", "sweep"), named)
    if not sweep.points:
        raise program.UsageError(f"sweep: {argument}: names no point")
    if baseline:
        sweep = sweep._replace(baseline=dict(_setting(text, "baseline") for text in baseline.split(";")))
    if sweep.baseline and not any(series.is_of(point, sweep.baseline) for point in sweep.points):
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
