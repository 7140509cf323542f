"""What is compared: the rows of a config file's `get_comparison()`, their runs, and their figures."""

from __future__ import annotations

import dataclasses
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from experiments.cli import program
from experiments.cli.tables import markdown
from experiments.studies import results, runs


class Column(NamedTuple):
    """How a figure is shown: its title, what it is multiplied by, its format, its unit's sign."""

    title: str
    scale: float
    form: str
    sign: str = ""


COLUMNS = {
    "eval_loss": Column("held-out loss", 1, ".4f"),
    "gap": Column("gap", 100, "+.2f", "%"),  # of eval_loss to that of the row `against`, seed by seed
    "eval_accuracy": Column("held-out accuracy", 100, ".1f", "%"),
    "tokens_total": Column("tokens", 1, ",.0f"),
    "wall_seconds": Column("seconds", 1, ",.1f"),
    "time_ratio": Column("time ratio", 1, ".3f"),  # of wall_seconds to the first row's, seed by seed
    "goodput": Column("goodput", 100, ".1f", "%"),
    "uptime": Column("uptime", 100, ".1f", "%"),
    "merged_share": Column("merged", 100, ".0f", "%"),
    "mean_quorum": Column("mean quorum", 1, ".2f"),
    "bytes_moved": Column("GB moved", 1e-9, ".4g"),  # of `results.bytes_moved`
}
SHOWN = tuple(COLUMNS)  # unless a config file names others
COLUMNS |= {
    "rounds_skipped": Column("skipped", 1, ",.0f"),
    # Of `results.merge_figures`.
    "worst_share": Column("worst learner", 100, ".0f", "%"),
    "real_steps": Column("real steps", 1, ".2f"),
    "age": Column("age", 1, ".1f"),
    "late_age": Column("age, 95%", 1, ".1f"),
    "round_seconds": Column("round, s", 1, ".1f"),
    "largest_gap": Column("largest gap", 1, ".2f"),
}
_OWN_KEYS = ("label", "preset", "paper", "against")


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """What is compared: its label, published figures, and its run for each seed."""

    label: str
    paper: Mapping[str, float]
    runs: Mapping[int, runs.PlannedRun]
    against: str | None = None  # the label of the row whose loss the gap is above


def make_rows(
    argument: str,
    comparison: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
    given: Sequence[tuple[str, str]],
    output: pathlib.Path,
) -> list[ComparisonRow]:
    """The rows with their runs, whose folders lie in `output`.

    Raises:
      UsageError: there is none, rows without labels of their own, the seed as a setting, an unknown
        published figure, or settings that a run cannot have.
    """
    path, rows = argument.partition(":")[0], []
    if not comparison:
        raise program.UsageError(f"config: {argument}: its get_comparison() names no row")
    for entry in comparison:
        if (problem := _problem(entry)) is not None:
            raise program.UsageError(f"config: {argument}: {problem}")
    check_labels(argument, [(entry["label"], entry.get("against")) for entry in comparison])
    for entry in comparison:
        label, preset = entry["label"], entry.get("preset")
        own = [(name, v) for name, v in entry.items() if name not in (*_OWN_KEYS, *dict(given))]
        if "seed" in dict([*own, *given]):
            raise program.UsageError(f"config.seed: is set for {label!r}, but --seeds says which there are")
        config, folder = f"{path}:{preset}" if preset else path, output / runs.folder_name(label)
        by_seed = runs.of_each_seed(label, config, [*own, *given], folder, seeds)
        rows.append(ComparisonRow(label, entry.get("paper", {}), by_seed, entry.get("against")))
    return rows


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


def columns_of(argument: str) -> Sequence[str]:
    """The figures of the table: `COLUMNS` of the config file, or else SHOWN.

    Raises:
      UsageError: there is no such file or figure.
    """
    columns = getattr(program.load_module(argument.partition(":")[0], "config"), "COLUMNS", SHOWN)
    for name in columns:
        if name not in COLUMNS:
            raise program.UsageError(f"config: {argument}: COLUMNS: {_unknown(name)}")
    return columns


def carry_out(
    rows: Sequence[ComparisonRow], jobs: int, output: pathlib.Path, name: str, columns: Sequence[str] = SHOWN
) -> int:
    """Runs what the rows lack, and writes their figures as `name`.json, .md and .png; the exit code.

    `columns`: of the table.
    """
    from experiments.studies import figures

    def collect() -> results.Report:
        found = digest(rows)
        return {"rows": found}, table(found, columns), lambda path: figures.draw_comparison(path, found)

    planned = [run for row in rows for run in row.runs.values()]
    return runs.carry_out(planned, jobs, output / name, collect)


def digest(rows: Sequence[ComparisonRow]) -> list[dict[str, Any]]:
    """The figures of every row, ready for JSON: of each finished run, their means and standard deviations.

    A run of other settings has not finished. A figure that no run has is None; so is the standard deviation
    of fewer than two.
    """
    entries = [(row, _entry(seed, run)) for row in rows for seed, run in row.runs.items()]
    frame = pd.DataFrame([{**entry, "label": row.label} for row, entry in entries])
    own = [(row.label, entry["seed"]) for row, entry in entries]
    first = [(rows[0].label, entry["seed"]) for _, entry in entries]
    against = [(row.against, entry["seed"]) for row, entry in entries]
    frame["time_ratio"] = results.over_baseline(frame.wall_seconds, own, first)
    frame["gap"] = results.over_baseline(frame.eval_loss, own, against) - 1
    mean, std = results.over_seeds(frame, ["label"], list(COLUMNS))
    for (_, entry), ratio, gap in zip(entries, frame.time_ratio, frame.gap, strict=True):
        entry.update(time_ratio=results.or_none(ratio), gap=results.or_none(gap))
    found = []
    for row in rows:
        of_row = [entry for of, entry in entries if of is row]
        lost = pd.DataFrame([entry["lost"] for entry in of_row if entry["lost"]]).fillna(0.0).mean()
        found.append(
            {
                "label": row.label,
                "paper": dict(row.paper),
                "mean": {name: results.or_none(mean.at[row.label, name]) for name in COLUMNS},
                "std": {name: results.or_none(std.at[row.label, name]) for name in COLUMNS},
                "lost": lost.to_dict(),
                "runs": of_row,
            }
        )
    return found


def clock_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the seconds are: virtual, wall, or, where both are there, seconds."""
    drivers = {run["driver"] for row in rows for run in row["runs"] if run["finished"]}
    if "virtual" not in drivers:
        return "wall seconds"
    return "virtual seconds" if len(drivers) == 1 else "seconds"


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = SHOWN) -> str:
    """The rows as a Markdown table; columns that are None in every row are left out."""
    names = [name for name in columns if any(row["mean"][name] is not None for row in rows)]
    if len(rows) == 1 and "time_ratio" in names:
        names.remove("time_ratio")
    titles = {name: COLUMNS[name].title for name in names} | {"wall_seconds": clock_of(rows)}
    cells = [[label_of(row).replace("|", "\\|"), *(cell(row, name) for name in names)] for row in rows]
    return markdown(["", *(titles[name] for name in names)], cells, align=True)


def label_of(row: Mapping[str, Any]) -> str:
    """A row's label, which says so where its figures are not of all seeds."""
    finished, seeds = sum(run["finished"] for run in row["runs"]), len(row["runs"])
    return row["label"] if finished == seeds else f"{row['label']} ({finished} of {seeds} seeds)"


def cell(row: Mapping[str, Any], name: str) -> str:
    """A row's figure: mean, standard deviation where there are several seeds, and what the paper has."""
    _, scale, form, sign = COLUMNS[name]
    mean, std = (None if value is None else scale * value for value in (row["mean"][name], row["std"][name]))
    text = results.plus_minus(mean, std, form, sign=sign)
    if name not in row["paper"]:
        return text
    return f"{text} (paper {scale * row['paper'][name]:.6g}{sign})"  # in the digits that were published


def _problem(entry: Mapping[str, Any]) -> str | None:
    label = entry.get("label")
    if not isinstance(label, str) or not any(map(str.isalnum, label)):
        return f"a row's label is {label!r}, but must be a name"
    for name, value in entry.get("paper", {}).items():
        if name not in COLUMNS:
            return f"{label!r}: paper: {_unknown(name)}"
        if not isinstance(value, int | float):
            return f"{label!r}: paper: {name} is {value!r}, but must be a number"
    return None


def _unknown(name: str) -> str:
    return f"no figure {name!r}; known: {', '.join(COLUMNS)}"


def _entry(seed: int, run: runs.PlannedRun) -> dict[str, Any]:
    finished = run.lacks() is None
    summary = results.read_summary(run.workdir) if finished else {}
    moved, by_score = results.bytes_moved(run.workdir, summary)
    merged = results.merge_figures(run.workdir) if finished else {}
    figures = {**summary, "bytes_moved": moved, **merged}
    scores = summary.get("eval_history", [])
    return {
        "seed": seed,
        "command": shlex.join(["python", "-m", "experiments.train", *run.arguments()]),
        "finished": finished,
        "driver": summary.get("driver"),
        **{name: figures.get(name) for name in COLUMNS},
        "lost": summary.get("lost", {}),
        "eval_history": [{**score, "bytes": n} for score, n in zip(scores, by_score, strict=True)],
    }
