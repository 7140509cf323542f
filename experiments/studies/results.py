"""The results table: figures of runs, their means over seeds, their ratios to a baseline, and Markdown."""

from __future__ import annotations

import collections
import functools
import json
import operator
import pathlib
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ddiloco.telemetry.files import read_json, read_values
from experiments.cli.tables import markdown

DATA_PARALLEL = ("data_parallel", "elastic_data_parallel")
PARAMETER_BYTES = 4  # of an element of the parameters that a learner is welcomed with
Report = tuple[Any, str, Callable[[pathlib.Path], None]]  # for JSON; as Markdown; and what draws its figure
_ROUND_PARTS = ("quorum_seconds", "grace_seconds", "sync_seconds")


def read_summary(workdir: pathlib.Path) -> dict[str, Any]:
    """The summary of a run, with `tokens_total`, those of all learners, and `left_out`, so many offers."""
    summary = json.loads((workdir / "summary.json").read_text())
    left_out = sum(summary.get("offers_left_out", {}).values())
    return {**summary, "tokens_total": sum(summary["tokens"].values()), "left_out": left_out}


def over_seeds(
    runs: pd.DataFrame, by: Sequence[str], figures: Sequence[str]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Mean and standard deviation of each figure over the runs that are alike in `by`, in their order.

    NaN: the mean where no run has the figure, the deviation where fewer than two have it.
    """
    groups = runs[list(figures)].astype(float).groupby([runs[name] for name in by], sort=False, dropna=False)
    deviation = groups.std()
    return groups.mean(), deviation.mask(deviation.notna() & (groups.nunique() == 1), 0.0)


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


def plus_minus(
    mean: float | None, deviation: float | None, form: str, *, sign: str = "", deviation_form: str = ""
) -> str:
    """A figure with its standard deviation as text; a dash where there is no figure."""
    if pd.isna(mean):
        return "-"
    text = f"{mean:{form}}{sign}"
    form = (deviation_form or form).removeprefix("+")
    return text if pd.isna(deviation) else f"{text} ± {deviation:{form}}{sign}"


def table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; empty without rows."""
    cells = list(rows)
    return markdown(names, cells) if cells else ""


def write(stem: pathlib.Path, report: Report) -> None:
    """Writes the values as STEM.json, the text as STEM.md and the figure as STEM.png."""
    values, text, draw = report
    stem.with_suffix(".json").write_text(json.dumps(values, indent=2, allow_nan=False) + "\n")
    stem.with_suffix(".md").write_text(text + "\n")
    draw(stem.with_suffix(".png"))


def show(stem: pathlib.Path) -> None:
    """Prints what `write` has written, and where it is."""
    print(stem.with_suffix(".md").read_text(), end="")
    print("  ".join(str(stem.with_suffix(kind)) for kind in (".json", ".md", ".png")))


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


def merge_figures(workdir: pathlib.Path) -> Mapping[str, float]:
    """Figures of a finished run's merges; none where it had no merge, or its files do not have them.

    Returns:
      worst_share: the least share of a learner's work that was merged.
      real_steps: inner steps over those of all learners' clocks; the others were skipped.
      age, late_age: steps that a learner had taken since an offer when it was merged; the mean, and what one
        offer in twenty reaches.
      round_seconds: from a round's due step to its version, the mean.
      largest_gap: the longest that a fragment was without a merge, in intervals, to the run's end.
    """
    return _merge_figures(workdir, (workdir / "summary.json").stat().st_mtime_ns)


@functools.cache  # a comparison asks again whenever a run has ended
def _merge_figures(workdir: pathlib.Path, ended_ns: int) -> Mapping[str, float]:
    summary = read_json(workdir / "summary.json")
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
