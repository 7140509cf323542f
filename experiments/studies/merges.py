"""What merges a run had: the age of their offers, the time of their rounds, and the gaps between them."""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddiloco.telemetry.files import read_json, read_values
from experiments.studies.chaos.committed import Contributed

_PARTS = ("quorum_seconds", "grace_seconds", "sync_seconds")  # of a round


def figures(workdir: pathlib.Path) -> Mapping[str, float]:
    """Figures of a finished run's merges; none where it had no merge, or its files do not have them.

    Returns:
      worst_share: the least share of a learner's work that was merged.
      real_steps: inner steps over those of all learners' clocks; the others were skipped.
      age, late_age: steps that a learner had taken since an offer when it was merged; the mean, and what one
        offer in twenty reaches.
      round_seconds: from a round's due step to its version, the mean.
      largest_gap: the longest that a fragment was without a merge, in intervals, to the run's end.
    """
    return _figures(workdir, (workdir / "summary.json").stat().st_mtime_ns)


@functools.cache  # a comparison asks again whenever a run has ended
def _figures(workdir: pathlib.Path, ended_ns: int) -> Mapping[str, float]:
    summary = read_json(workdir / "summary.json")
    lines = (line for line in read_values(workdir / "rounds.jsonl") if line.get("contributions"))
    rounds = sorted(lines, key=operator.itemgetter("time"))  # without those of which nothing was merged
    interval = read_json(workdir / "config.json").get("sync", {}).get("interval")
    shares, taken = summary.get("merged_shares"), summary.get("inner_steps")
    if not (rounds and interval and shares and taken):
        return {}
    steps = {m: _Steps(workdir / "learners" / m / "steps.jsonl") for m in taken}
    ages = sorted(_ages(rounds, steps))
    total = summary["total_steps"]
    return {
        "worst_share": min(shares.values()),
        "real_steps": sum(taken.values()) / (total * len(taken)),
        "age": statistics.fmean(ages),
        "late_age": float(ages[len(ages) * 19 // 20]),
        "round_seconds": statistics.fmean(sum(r[part] for part in _PARTS) for r in rounds),
        "largest_gap": max(_gaps(rounds, list(steps.values()), total)) / interval,
    }


class _Steps:
    """A learner's steps."""

    def __init__(self, path: pathlib.Path) -> None:
        lines = sorted(read_values(path), key=operator.itemgetter("time"))
        self._times = [line["time"] for line in lines]
        self._clocks = [line["step"] for line in lines]  # after each; a killed learner may come back to fewer
        self._furthest = list(itertools.accumulate(self._clocks, max))

    def since(self, clock: int, time: float) -> int:
        """Steps taken from this clock until this time."""
        last = bisect.bisect_right(self._times, time)
        before = (self._clocks[i] for i in range(last - 1, -1, -1))
        return sum(1 for _ in itertools.takewhile(lambda at: at > clock, before))

    def furthest(self, time: float) -> int:
        """The clock by then."""
        last = bisect.bisect_right(self._times, time)
        return self._furthest[last - 1] if last else 0


def _ages(rounds: Sequence[Mapping[str, Any]], steps: Mapping[str, _Steps]) -> Iterator[int]:
    for r in rounds:
        for c in itertools.starmap(Contributed, r["contributions"]):
            yield steps[str(c.learner)].since(c.step, r["time"])


def _gaps(rounds: Sequence[Mapping[str, Any]], steps: Sequence[_Steps], total: int) -> Iterator[int]:
    """Steps of the furthest clock from a fragment's merge, or the start, to its next, or to the end."""
    merged: dict[int, int] = {}
    for r in rounds:
        clock = max(learner.furthest(r["time"]) for learner in steps)
        yield clock - merged.get(r["fragment"], 0)
        merged[r["fragment"]] = clock
    yield from (total - clock for clock in merged.values())
