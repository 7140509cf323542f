"""What is compared: the rows of a config file's `get_comparison()`, their runs, and their figures."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.cli import program
from experiments.cli.tables import markdown
from experiments.studies import merges, runs, traffic


class Column(NamedTuple):
    """How a figure is shown: its title, what it is multiplied by, its format, its unit's sign."""

    title: str
    scale: float
    form: str
    sign: str = ""

    def show(self, value: float) -> str:
        """Our own figure as text."""
        return f"{value * self.scale:{self.form}}{self.sign}"

    def spread(self, value: float) -> str:
        """A deviation of our own as text, which has no sign of its own."""
        return self._replace(form=self.form.removeprefix("+")).show(value)

    def quote(self, value: float) -> str:
        """A published figure, in the digits in which it was published."""
        return f"{value * self.scale:.6g}{self.sign}"


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
    "bytes_moved": Column("GB moved", 1e-9, ".4g"),  # as experiments/studies/traffic.py counts
}
SHOWN = tuple(COLUMNS)  # unless a config file names others
COLUMNS |= {
    "rounds_skipped": Column("skipped", 1, ",.0f"),
    # Of experiments/studies/merges.py.
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
    path = argument.partition(":")[0]
    rows: dict[str, ComparisonRow] = {}
    if not comparison:
        raise program.UsageError(f"config: {argument}: its get_comparison() names no row")
    for entry in comparison:
        problem = _problem(entry)
        if problem is not None:
            raise program.UsageError(f"config: {argument}: {problem}")
        label, preset = entry["label"], entry.get("preset")
        own = [(name, v) for name, v in entry.items() if name not in (*_OWN_KEYS, *dict(given))]
        if "seed" in dict([*own, *given]):
            raise program.UsageError(f"config.seed: is set for {label!r}, but --seeds says which there are")
        folder = runs.folder_name(label)
        if folder in rows:
            raise program.UsageError(
                f"config: {argument}: {label!r} and {rows[folder].label!r} are too alike"
            )
        config = f"{path}:{preset}" if preset else path
        by_seed = runs.of_each_seed(label, config, [*own, *given], output / folder, seeds)
        rows[folder] = ComparisonRow(label, entry.get("paper", {}), by_seed, entry.get("against"))
    for row in rows.values():
        if row.against not in (None, *(other.label for other in rows.values())):
            told = f"{row.label!r}: is held against {row.against!r}, which is no row"
            raise program.UsageError(f"config: {argument}: {told}")
    return list(rows.values())


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
    from experiments.studies import comparison_figure

    def write(_: runs.PlannedRun | None = None) -> None:
        results = digest(rows)
        text = json.dumps({"rows": results}, indent=2, allow_nan=False)
        (output / f"{name}.json").write_text(text + "\n")
        (output / f"{name}.md").write_text(table(results, columns) + "\n")
        comparison_figure.draw(output / f"{name}.png", results)

    failed = runs.train([run for row in rows for run in row.runs.values()], jobs, write)
    write()
    print((output / f"{name}.md").read_text(), end="")
    print(f"{output}/{name}.json  {output}/{name}.md  {output}/{name}.png")
    return runs.tell_failed(failed)


def digest(rows: Sequence[ComparisonRow]) -> list[dict[str, Any]]:
    """The figures of every row, ready for JSON: of each finished run, their means and standard deviations.

    A run of other settings has not finished. A figure that no run has is None; so is the standard deviation
    of fewer than two.
    """
    entries = [[_entry(seed, run) for seed, run in row.runs.items()] for row in rows]
    seconds = {entry["seed"]: entry["wall_seconds"] for entry in entries[0]}  # the first row's
    losses = {
        (row.label, entry["seed"]): entry["eval_loss"]
        for row, own in zip(rows, entries, strict=True)
        for entry in own
    }
    results = []
    for row, own in zip(rows, entries, strict=True):
        for entry in own:
            entry["time_ratio"] = _ratio(entry["wall_seconds"], seconds[entry["seed"]])
            ratio = _ratio(entry["eval_loss"], losses.get((row.against, entry["seed"])))
            entry["gap"] = None if ratio is None else ratio - 1
        figures = {name: [e[name] for e in own if e[name] is not None] for name in COLUMNS}
        lost = [entry["lost"] for entry in own if entry["lost"]]
        causes = dict.fromkeys(cause for one in lost for cause in one)
        results.append(
            {
                "label": row.label,
                "paper": dict(row.paper),
                "mean": {name: statistics.fmean(f) if f else None for name, f in figures.items()},
                "std": {name: statistics.stdev(f) if len(f) > 1 else None for name, f in figures.items()},
                "lost": {cause: statistics.fmean(one.get(cause, 0.0) for one in lost) for cause in causes},
                "runs": own,
            }
        )
    return results


def clock_of(results: Sequence[Mapping[str, Any]]) -> str:
    """What the seconds are: virtual, wall, or, where both are there, seconds."""
    drivers = {run["driver"] for row in results for run in row["runs"] if run["finished"]}
    if "virtual" not in drivers:
        return "wall seconds"
    return "virtual seconds" if len(drivers) == 1 else "seconds"


def table(results: Sequence[Mapping[str, Any]], columns: Sequence[str] = SHOWN) -> str:
    """The rows as a Markdown table; columns that are None in every row are left out."""
    names = [name for name in columns if any(row["mean"][name] is not None for row in results)]
    if len(results) == 1 and "time_ratio" in names:
        names.remove("time_ratio")
    titles = {name: COLUMNS[name].title for name in names} | {"wall_seconds": clock_of(results)}
    cells = [[label_of(row).replace("|", "\\|"), *(cell(row, name) for name in names)] for row in results]
    return markdown(["", *(titles[name] for name in names)], cells, align=True)


def label_of(row: Mapping[str, Any]) -> str:
    """A row's label, which says so where its figures are not of all seeds."""
    finished, seeds = sum(run["finished"] for run in row["runs"]), len(row["runs"])
    return row["label"] if finished == seeds else f"{row['label']} ({finished} of {seeds} seeds)"


def cell(row: Mapping[str, Any], name: str) -> str:
    """A row's figure: mean, standard deviation where there are several seeds, and what the paper has."""
    column, mean, std, paper = COLUMNS[name], row["mean"][name], row["std"][name], row["paper"].get(name)
    text = "-" if mean is None else column.show(mean)
    text += "" if std is None else f" ± {column.spread(std)}"
    return text if paper is None else f"{text} (paper {column.quote(paper)})"


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
    summary = runs.read_summary(run.workdir) if finished else {}
    moved, by_score = traffic.moved(run.workdir, summary)
    figures = {**summary, "bytes_moved": moved, **(merges.figures(run.workdir) if finished else {})}
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


def _ratio(ours: float | None, other: float | None) -> float | None:
    return ours / other if ours is not None and other else None
