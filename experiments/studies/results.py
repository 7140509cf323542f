"""The results table: a row for each run, with what it differs in, and its figures.

Comparisons, sweeps and tuned rows are points times seeds: a `Study`. One frame has all of their runs.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import operator
import os
import pathlib
import shlex
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ddiloco.storage import array_file
from ddiloco.telemetry.files import read_json, read_values
from ddiloco.telemetry.scalars import as_json
from experiments.cli import program
from experiments.cli.tables import markdown
from experiments.studies import runs

DATA_PARALLEL = ("data_parallel", "elastic_data_parallel")
PARAMETER_BYTES = 4  # of an element of the parameters that a learner is welcomed with
SEED = "seed"
_ROUND_PARTS = ("quorum_seconds", "grace_seconds", "sync_seconds")


class Column(NamedTuple):
    """How a figure is shown: its title, what it is multiplied by, its format, its unit's sign."""

    title: str
    scale: float = 1
    form: str = ",.0f"
    sign: str = ""


COLUMNS = {  # of the results table, in the order in which they are shown
    "eval_loss": Column("held-out loss", 1, ".4f"),
    "gap": Column("gap", 100, "+.2f", "%"),  # of eval_loss to the baseline's with the same seed
    "match": Column("same loss at", 100, ".0f", "%"),  # share of the tokens with which the baseline has it
    "eval_accuracy": Column("held-out accuracy", 100, ".1f", "%"),
    "tokens_total": Column("tokens"),
    "wall_seconds": Column("seconds", 1, ",.1f"),
    "time_ratio": Column("time ratio", 1, ".3f"),  # of wall_seconds to the first row's with the same seed
    "goodput": Column("goodput", 100, ".1f", "%"),
    "uptime": Column("uptime", 100, ".1f", "%"),
    "merged_share": Column("merged", 100, ".0f", "%"),
    "mean_quorum": Column("mean quorum", 1, ".2f"),
    "bytes_moved": Column("GB moved", 1e-9, ".4g"),  # of `bytes_moved`
}
SHOWN = tuple(COLUMNS)  # unless a file names others
COLUMNS |= {
    "train_loss": Column("training loss", 1, ".4f"),
    "num_params": Column("parameters"),
    "rounds": Column("rounds"),
    "left_out": Column("offers left out"),
    "honest_left_out": Column("of honest learners"),
    "tokens_per_second": Column("tokens/s"),
    "rounds_skipped": Column("skipped"),
    # Of `merge_figures`.
    "worst_share": Column("worst learner", 100, ".0f", "%"),
    "real_steps": Column("real steps", 1, ".2f"),
    "age": Column("age", 1, ".1f"),
    "late_age": Column("age, 95%", 1, ".1f"),
    "round_seconds": Column("round, s", 1, ".1f"),
    "largest_gap": Column("largest gap", 1, ".2f"),
}


@dataclasses.dataclass(frozen=True)
class Study:
    """The runs of one table.

    Attributes:
      rows: of each run what it differs in: settings or a label, and its seed.
      planned: the runs, in the order of the rows.
      by: those of the rows' names in which the runs of one point are alike.
      complete: adds the figures that follow from other runs, such as the gap, to the frame of all.
      draw: draws the frame's figure.
      columns: the figures that the table shows.
    """

    rows: Sequence[Mapping[str, Any]]
    planned: Sequence[runs.PlannedRun]
    by: Sequence[str]
    complete: Callable[[pd.DataFrame], None]
    draw: Callable[[pathlib.Path, pd.DataFrame], None]
    columns: Sequence[str] = SHOWN

    def frame(self) -> pd.DataFrame:
        """A row for each run; those that have not finished have no figures (NaN)."""
        return frame_of(self.rows, self.planned, self.complete)

    def write(self, stem: pathlib.Path) -> None:
        """Writes STEM.json, what has finished; STEM.md, the table; STEM.png; and STEM.html, the page."""
        from experiments.studies import pages

        frame = self.frame()
        text = "\n\n".join([table(frame, self.by, self.columns), *standing(frame, self.by)])
        write(stem, frame[frame.finished].to_dict("records"), text)
        self.draw(stem.with_suffix(".png"), frame)
        folders = [os.path.relpath(run.workdir, stem.parent) for run in self.planned]
        page = pages.page(stem.parent.resolve().name, frame, self.by, self.columns, folders)
        array_file.replace(stem.with_suffix(".html"), [page.encode()])


def carry_out(study: Study, jobs: int, stem: pathlib.Path, engine: runs.Engine | None = None) -> int:
    """Runs what the study lacks; writes its results after each run, prints them at the end; the exit code."""
    failed = runs.train(study.planned, jobs, lambda run: study.write(stem), engine)
    study.write(stem)
    show(stem)
    return runs.report_failed(failed)


def write(stem: pathlib.Path, values: Any, text: str) -> None:
    """Writes the values as STEM.json and the text as STEM.md."""
    stem.with_suffix(".json").write_text(json.dumps(as_json(values), indent=2, allow_nan=False) + "\n")
    stem.with_suffix(".md").write_text(text + "\n")


def show(stem: pathlib.Path) -> None:
    """Prints the table of that name, and where all of it is."""
    print(stem.with_suffix(".md").read_text(), end="")
    kinds = [kind for kind in (".json", ".md", ".png", ".html") if stem.with_suffix(kind).exists()]
    print("  ".join(str(stem.with_suffix(kind)) for kind in kinds))


def columns_of(argument: str, flag: str) -> Sequence[str]:
    """The figures of the table: `COLUMNS` of the file that the flag names, or else SHOWN.

    Raises:
      UsageError: there is no such file or figure.
    """
    columns = getattr(program.load_module(argument.partition(":")[0], flag), "COLUMNS", SHOWN)
    for name in columns:
        if name not in COLUMNS:
            raise program.UsageError(f"{flag}: {argument}: COLUMNS: {unknown(name)}")
    return columns


def unknown(name: str) -> str:
    """The message for a missing figure."""
    return f"no figure {name!r}; known: {', '.join(COLUMNS)}"


def frame_of(
    rows: Sequence[Mapping[str, Any]],
    planned: Sequence[runs.PlannedRun],
    complete: Callable[[pd.DataFrame], None] = lambda frame: None,
) -> pd.DataFrame:
    """The rows with their runs' commands, whether these have `finished`, and their figures."""
    records = []
    for row, run in zip(rows, planned, strict=True):
        finished = run.lacks() is None
        command = shlex.join(["python", "-m", runs.PROGRAM, *run.arguments()])
        figures = figures_of(run.workdir) if finished else {}
        records.append({**row, "command": command, "finished": finished, **figures})
    return completed(records, complete)


def completed(
    records: Iterable[Mapping[str, Any]], complete: Callable[[pd.DataFrame], None] = lambda frame: None
) -> pd.DataFrame:
    """The records, each with `finished`, as a results table, whose figures are floats."""
    frame = pd.DataFrame(list(records), dtype=object)
    frame["finished"] = frame.finished.astype(bool)
    for name in COLUMNS:
        frame[name] = frame[name].astype(float) if name in frame else np.nan
    complete(frame)
    return frame


def figures_of(workdir: pathlib.Path) -> Mapping[str, Any]:
    """The figures of a finished run, as its files have them, with `lost`, `driver` and `eval_history`."""
    return _figures_of(workdir, (workdir / "summary.json").stat().st_mtime_ns)


@functools.cache  # a study asks again whenever a run has ended
def _figures_of(workdir: pathlib.Path, ended_ns: int) -> Mapping[str, Any]:
    summary = json.loads((workdir / "summary.json").read_text())
    moved, by_score = bytes_moved(workdir, summary)
    scores = summary.get("eval_history", [])
    figures = {
        **summary,
        **merge_figures(workdir, summary),
        "tokens_total": sum(summary["tokens"].values()),
        "left_out": sum(summary.get("offers_left_out", {}).values()),
        "bytes_moved": moved,
    }
    return {
        **{name: figures.get(name) for name in (*COLUMNS, "driver")},
        "lost": summary.get("lost", {}),
        "eval_history": [{**score, "bytes": n} for score, n in zip(scores, by_score, strict=True)],
    }


def over_seeds(
    frame: pd.DataFrame, by: Sequence[str], figures: Sequence[str]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Mean and standard deviation of each figure over the runs that are alike in `by`, in their order.

    NaN: the mean where no run has the figure, the deviation where fewer than two have it.
    """
    groups = frame[list(figures)].astype(float).groupby(keys(frame, by), sort=False)
    deviation = groups.std()
    return groups.mean(), deviation.mask(deviation.notna() & (groups.nunique() == 1), 0.0)


def keys(frame: pd.DataFrame, by: Sequence[str]) -> list[pd.Series]:
    """The texts of these columns, by which runs are grouped; empty where a row has no such setting."""
    texts = [frame[name].map(lambda x: "" if isinstance(x, float) and np.isnan(x) else str(x)) for name in by]
    return texts or [pd.Series("", frame.index)]


def over_baseline(
    figures: Sequence[float | None], own: Iterable[Hashable], wanted: Iterable[Hashable]
) -> np.ndarray:
    """Each run's figure over that of its baseline; NaN where a run or its only baseline has none, or 0.

    `own`: by which each run is found as a baseline; `wanted`: the baseline of each run.
    """
    values = np.asarray(figures, float)
    found = collections.defaultdict[Hashable, list[float]](list)
    for key, value in zip(own, values, strict=True):
        if value and not np.isnan(value):
            found[key].append(value)
    baselines = [found[key][0] if len(found[key]) == 1 else np.nan for key in wanted]
    return values / np.asarray(baselines)


def or_none(value: Any) -> Any:
    """The value, or None for NaN, which JSON has not."""
    return None if pd.isna(value) else value


def learners_name(learners: int) -> str:
    """The name of runs with this number of learners; 0 stands for data-parallel training."""
    return f"M={learners}" if learners else "data-parallel"


def clock_of(frame: pd.DataFrame) -> str:
    """What the seconds are: virtual, wall, or, where both are there, seconds."""
    drivers = set(frame.driver.dropna()) if "driver" in frame else set()
    if "virtual" not in drivers:
        return "wall seconds"
    return "virtual seconds" if len(drivers) == 1 else "seconds"


def table(frame: pd.DataFrame, by: Sequence[str], columns: Sequence[str] = SHOWN) -> str:
    """Each point's figures as a row of a Markdown table, mean ± standard deviation over seeds.

    Figures that no run has are left out. Where a row has `paper`, its published figures stand beside ours.
    """
    head, *points = [[text.replace("|", "\\|") for text in row] for row in cells(frame, by, columns)]
    return markdown(head, points, align=True)


def cells(frame: pd.DataFrame, by: Sequence[str], columns: Sequence[str] = SHOWN) -> list[list[str]]:
    """The same table as texts; its first row has the names of the columns."""
    names = [name for name in columns if frame[name].notna().any()]
    titles = {name: COLUMNS[name].title for name in names} | {"wall_seconds": clock_of(frame)}
    means, deviations = over_seeds(frame, by, names)
    rows = [["" if name == "label" else name for name in by] + ["runs"] + [titles[name] for name in names]]
    for i, (key, own) in enumerate(frame.groupby(keys(frame, by), sort=False)):
        done = f"{own.finished.sum()}" if own.finished.all() else f"{own.finished.sum()} of {len(own)}"
        paper = own.paper.iloc[0] if "paper" in own else {}
        found = [cell(name, means[name].iloc[i], deviations[name].iloc[i], paper) for name in names]
        rows.append([*key[: len(by)], done, *found])
    return rows


class Ranked(NamedTuple):
    """A point that has a held-out loss, beside the best one.

    Attributes:
      place: in the table, from 0.
      name: its settings.
      loss, deviation: mean and standard deviation over seeds; the latter is NaN for one seed.
      seeds: how many have finished.
      above, error: mean difference to the best point's loss with the same seed, and its standard error; NaN
        where fewer than one or two seeds are of both.
    """

    place: int
    name: str
    loss: float
    deviation: float
    seeds: int
    above: float
    error: float

    @property
    def tied(self) -> bool:
        """Whether the difference is within two standard errors."""
        return self.above <= 2 * self.error


def ranked(frame: pd.DataFrame, by: Sequence[str]) -> list[Ranked]:
    """The points that have a held-out loss, the best first."""
    seeds = frame[SEED].fillna(0) if SEED in frame else pd.Series(0, frame.index)
    losses = [
        (place, _point_name(by, key), own.eval_loss.dropna().groupby(seeds).mean())
        for place, (key, own) in enumerate(frame.groupby(keys(frame, by), sort=False))
    ]
    known = sorted((point for point in losses if len(point[2])), key=lambda point: point[2].mean())
    found = []
    for place, name, own in known:
        above = (own - known[0][2]).dropna()
        error = above.std() / len(above) ** 0.5 if len(above) else np.nan
        found.append(Ranked(place, name, own.mean(), own.std(), len(own), above.mean(), error))
    return found


def standing(frame: pd.DataFrame, by: Sequence[str]) -> list[str]:
    """Which point is best, and which are not told apart from it, a line each; none for fewer than two."""
    points = ranked(frame, by)
    if len(points) < 2:
        return []
    best, *others = points
    loss = plus_minus(best.loss, best.deviation, ".4f")
    lines = [f"Best: {best.name}, held-out loss {loss} ({best.seeds} seed{'s' * (best.seeds != 1)})"]
    tied = [f"{one.name} ({plus_minus(one.above, one.error, '+.4f')})" for one in others if one.tied]
    if tied:
        lines.append(f"Within two standard errors of it, seed by seed: {'; '.join(tied)}")
    if any(np.isnan(one.error) for one in others):
        lines.append("Points without two seeds in common with it have no error")
    return lines


def _point_name(by: Sequence[str], key: Sequence[str]) -> str:
    given = [(name, value) for name, value in zip(by, key, strict=False) if value]
    if len(given) == 1 or list(by) == ["label"]:
        return ", ".join(value if name == "label" else f"{name}={value}" for name, value in given) or "all"
    return ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in given) or "all"


def cell(name: str, mean: float, deviation: float, paper: Mapping[str, float]) -> str:
    """A figure: mean, standard deviation where there are several seeds, and what the paper has."""
    _, scale, form, sign = COLUMNS[name]
    text = plus_minus(scale * mean, scale * deviation, form, sign)
    if name not in paper:
        return text
    return f"{text} (paper {scale * paper[name]:.6g}{sign})"  # in the digits that were published


def plus_minus(mean: float | None, deviation: float | None, form: str, sign: str = "") -> str:
    """A figure with its standard deviation as text; a dash where there is no figure."""
    if pd.isna(mean):
        return "-"
    text = f"{mean:{form}}{sign}"
    return text if pd.isna(deviation) else f"{text} ± {deviation:{form.removeprefix('+')}}{sign}"


def bytes_moved(workdir: pathlib.Path, summary: Mapping[str, Any]) -> tuple[float | None, list[float | None]]:
    """Bytes that crossed the links, each counted once: of the whole run, and up to each evaluation.

    The decoupled family's are those of its wire, to the syncer and from it. Between evaluations they are
    shared out by the merges in `rounds.jsonl`, as if all fragments had one size. Data-parallel training
    has no wire here: it is counted as a ring all-reduce among M learners that exchange bfloat16 gradients,
    2 (M - 1) * 2 bytes a parameter and step. None where summary or settings lack what it takes.
    """
    from ddiloco.baselines.virtual import ring_bytes

    scores = summary.get("eval_history", [])
    learners = read_json(workdir / "config.json").get("sync", {}).get("num_learners")
    params, ring = summary.get("num_params"), summary.get("algorithm") in DATA_PARALLEL
    sent, received = summary.get("bytes_sent"), summary.get("bytes_received")
    if learners is None or (ring and not params) or (not ring and None in (sent, received)):
        return None, [None] * len(scores)
    if ring:
        a_step = learners * ring_bytes(params, learners)
        return a_step * summary["step"], [a_step * score["step"] for score in scores]
    lines = read_values(workdir / "rounds.jsonl")
    rounds = pd.DataFrame(lines, columns=["step", "quorum", "live"], dtype=float)
    welcomes = min(PARAMETER_BYTES * learners * (params or 0), received)

    def until(step: int) -> float:
        """`quorum` offers went up in a round, `live` updates down."""
        done = (rounds[rounds.step <= step].sum() / rounds.sum()).fillna(0.0)
        return float(welcomes + sent * done.quorum + (received - welcomes) * done.live)

    return sent + received, [until(score["step"]) for score in scores]


def merge_figures(workdir: pathlib.Path, summary: Mapping[str, Any]) -> Mapping[str, float]:
    """Figures of a finished run's merges; none where it had no merge, or its files do not have them.

    Returns:
      worst_share: the least share of a learner's work that was merged.
      real_steps: inner steps over those of all learners' clocks; the others were skipped.
      age, late_age: steps that a learner had taken since an offer when it was merged; the mean, and what one
        offer in twenty reaches.
      round_seconds: from a round's due step to its version, the mean.
      largest_gap: the longest that a fragment was without a merge, in intervals, to the run's end.
    """
    lines = (line for line in read_values(workdir / "rounds.jsonl") if line.get("contributions"))
    rounds = sorted(lines, key=operator.itemgetter("time"))  # without those of which nothing was merged
    interval = read_json(workdir / "config.json").get("sync", {}).get("interval")
    shares, taken = summary.get("merged_shares"), summary.get("inner_steps")
    if not (rounds and interval and shares and taken):
        return {}
    steps = {}
    for m in taken:
        own = pd.DataFrame(
            read_values(workdir / "learners" / m / "steps.jsonl"), columns=["time", "step"]
        ).sort_values("time", kind="stable")
        steps[m] = own.time.to_numpy(float), own.step.to_numpy(int)

    def clocks(learner: str, time: float) -> np.ndarray:
        """The learner's clock after each step until then; a killed learner may come back to fewer."""
        times, after = steps[learner]
        return after[: np.searchsorted(times, time, "right")]

    ages = []
    for r in rounds:
        for learner, _, _, offered, *_ in r["contributions"]:
            before = np.flatnonzero((known := clocks(str(learner), r["time"])) <= offered)
            ages.append(len(known) - (int(before[-1]) + 1 if len(before) else 0))
    gaps, merged = [], dict[int, int]()
    for r in rounds:
        clock = max(int(clocks(m, r["time"]).max(initial=0)) for m in taken)
        gaps.append(clock - merged.get(r["fragment"], 0))
        merged[r["fragment"]] = clock
    total = summary["total_steps"]
    gaps += [total - clock for clock in merged.values()]
    return {
        "worst_share": min(shares.values()),
        "real_steps": sum(taken.values()) / (total * len(taken)),
        "age": statistics.fmean(ages),
        "late_age": float(sorted(ages)[len(ages) * 19 // 20]),
        "round_seconds": statistics.fmean(sum(r[part] for part in _ROUND_PARTS) for r in rounds),
        "largest_gap": max(gaps) / interval,
    }
