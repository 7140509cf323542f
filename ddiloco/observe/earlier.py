"""Reads what earlier processes of the same run have left in the workdir."""

from __future__ import annotations

import collections
import heapq
import math
import operator
import pathlib
from collections.abc import Iterator
from typing import Any

from ddiloco.goodput.accounting import State
from ddiloco.observe.alarms import Alarms
from ddiloco.observe.files import read_json, read_values
from ddiloco.observe.records import Evaluated, LearnerDied, Noted, Record, StateChanged, StepDone
from ddiloco.observe.tally import COUNTS, LOST, READY, SKIPPED, Tally


def recall(workdir: pathlib.Path, tally: Tally, alarms: Alarms) -> None:
    """Adds what is in the files of earlier processes to the tally and the alarms of this one.

    Steps, tokens, losses, states, rounds and recoveries are complete. Counts without lines of their own, such
    as bytes, the evaluations and the alarms come from the last summary, at most 2 seconds old. Of a learner
    that the run no longer has only its steps count, with tokens and losses. Lines that cannot be read, such
    as a torn last one, are passed over.
    """
    paths = [path for path in (workdir / "learners").glob("*/steps.jsonl") if path.parent.name.isdigit()]
    told = (*(_steps(path) for path in sorted(paths)), _states(workdir), _departures(workdir))
    moments, heard = [], dict[int, float]()
    for record in heapq.merge(*told, key=operator.attrgetter("time")):  # figures mark departures at steps
        match record:
            case StepDone():
                heard[record.learner] = record.time
                tally.step_done(record)
            case StateChanged():
                heard[record.learner] = record.time
                moments.append(record.time)
                if record.learner in tally.info.chips_by_learner:
                    tally.state_changed(record)
            case Noted():
                tally.noted(record)
    for learner, time in heard.items():
        if learner not in tally.away | tally.finished:
            tally.timelines.away(learner, time)  # unless it turns out to have gone on
    for name, file in (("round", "rounds.jsonl"), ("recovered", "recoveries.jsonl")):
        for line in read_values(workdir / file):
            tally.noted(Noted(name, line, line["time"]))
    summary = read_json(workdir / "summary.json")
    tally.counts.update({name: int(summary.get(name, 0)) for name in COUNTS if name != SKIPPED})
    for name in ("sent", "received"):
        counted = summary.get(f"bytes_{name}_by_learner", {})
        getattr(tally, f"{name}_by_learner").update({int(m): count for m, count in counted.items()})
    tally.drops.update(summary.get("drops", {}))
    # Lines of rounds have no offers of those that made no version.
    left_out = {int(m): count for m, count in summary.get("offers_left_out", {}).items()}
    tally.rounds.left_out |= collections.Counter(left_out)
    alarms.recall(summary.get("alarms", []))
    tally.failures += [LearnerDied(**death) for death in summary.get("failures", [])]
    if moments:
        tally.started = min(moments)
    for score in summary.get("eval_history", []):
        tally.evaluations.append(_evaluation(dict(score), tally.started or 0.0))


def is_over(workdir: pathlib.Path, steps: int) -> bool:
    """Whether the run has come to all of these steps, with everything saved."""
    summary = read_json(workdir / "summary.json")
    step = summary.get("step")
    return summary.get("finished") is True and isinstance(step, int) and step >= steps


def _steps(path: pathlib.Path) -> Iterator[Record]:
    learner = int(path.parent.name)
    for line in read_values(path):
        metrics = {name: _number(line[name]) for name in ("loss", "skipped") if name in line}
        yield StepDone(learner, line["step"], line["time"], line["tokens"], metrics)


def _states(workdir: pathlib.Path) -> Iterator[Record]:
    for line in read_values(workdir / "states.jsonl"):
        yield StateChanged(int(line["learner"]), State(line["state"]), line["time"], line["chips"])


def _departures(workdir: pathlib.Path) -> Iterator[Record]:
    """Who was lost, and who came back."""
    for line in read_values(workdir / "events.jsonl"):
        if line.get("event") in (*LOST, *READY):
            yield Noted(line["event"], line, line["time"])


def _evaluation(score: dict[str, Any], started: float) -> Evaluated:
    step, tokens, seconds, loss = (score.pop(name) for name in ("step", "tokens", "seconds", "loss"))
    return Evaluated(step, tokens, started + seconds, _number(loss), score)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
