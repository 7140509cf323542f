"""What is compared: the labelled rows of a config file's `get_comparison()`, with a run for each seed."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from experiments.cli import program
from experiments.studies import figures, results, runs
from experiments.studies.results import COLUMNS, SHOWN, Study

_OWN_KEYS = ("label", "preset", "paper", "against")


def study(
    argument: str,
    entries: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
    given: Sequence[tuple[str, str]],
    output: pathlib.Path,
    columns: Sequence[str] = SHOWN,
) -> Study:
    """The rows of `get_comparison()` times seeds, whose runs' folders lie in `output`.

    Raises:
      UsageError: there is none, rows without labels of their own, the seed as a setting, an unknown
        published figure, or settings that a run cannot have.
    """
    path, named = argument.partition(":")[0], []
    if not entries:
        raise program.UsageError(f"config: {argument}: its get_comparison() names no row")
    for entry in entries:
        if (problem := _problem(entry)) is not None:
            raise program.UsageError(f"config: {argument}: {problem}")
    check_labels(argument, [(entry["label"], entry.get("against")) for entry in entries])
    for entry in entries:
        label, preset = entry["label"], entry.get("preset")
        own = [(name, v) for name, v in entry.items() if name not in (*_OWN_KEYS, *dict(given))]
        if "seed" in dict([*own, *given]):
            raise program.UsageError(f"config.seed: is set for {label!r}, but --seeds says which there are")
        config, folder = f"{path}:{preset}" if preset else path, output / runs.folder_name(label)
        by_seed = runs.of_each_seed(label, config, [*own, *given], folder, seeds)
        row = {"label": label, "against": entry.get("against"), "paper": entry.get("paper", {})}
        named += [({**row, "seed": seed}, run) for seed, run in by_seed.items()]
    return of_rows(named, columns)


def of_rows(
    named: Iterable[tuple[Mapping[str, Any], runs.PlannedRun]], columns: Sequence[str] = SHOWN
) -> Study:
    """The study of runs whose rows have `label`, `seed`, and `against`, the baseline's label or None."""
    rows, planned = zip(*named, strict=True)
    return Study(rows, planned, ["label"], held_against, figures.draw_comparison, columns)


def held_against(frame: pd.DataFrame) -> None:
    """Adds each run's gap to that of its baseline, and its time over the first row's, seed by seed."""
    own = list(zip(frame.label, frame.seed, strict=True))
    against = list(zip(frame.against, frame.seed, strict=True))
    first = [(frame.label.iloc[0], seed) for seed in frame.seed]
    frame["gap"] = results.over_baseline(frame.eval_loss, own, against) - 1
    if frame.label.nunique() > 1:
        frame["time_ratio"] = results.over_baseline(frame.wall_seconds, own, first)


def check_labels(argument: str, labels: Sequence[tuple[str, str | None]]) -> None:
    """Checks the label of each row and that of the row whose losses its own are held against, or None.

    Raises:
      UsageError: two labels name one folder, or there is no such other row.
    """
    folders: dict[str, str] = {}
    for label, _ in labels:
        folder = runs.folder_name(label)
        if folder in folders:
            raise program.UsageError(f"config: {argument}: {label!r} and {folders[folder]!r} are too alike")
        folders[folder] = label
    for label, against in labels:
        if against not in (None, *dict(labels)):
            problem = f"{label!r}: is held against {against!r}, which is no row"
            raise program.UsageError(f"config: {argument}: {problem}")


def _problem(entry: Mapping[str, Any]) -> str | None:
    label = entry.get("label")
    if not isinstance(label, str) or not any(map(str.isalnum, label)):
        return f"a row's label is {label!r}, but must be a name"
    for name, value in entry.get("paper", {}).items():
        if name not in COLUMNS:
            return f"{label!r}: paper: {results.unknown(name)}"
        if not isinstance(value, int | float):
            return f"{label!r}: paper: {name} is {value!r}, but must be a number"
    return None
