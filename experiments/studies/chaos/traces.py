"""What a run of processes under faults has left behind, as read from its files."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.studies.chaos.processes import KINDS, SYNCER

_UNDO = {"resume": "hang", "heal": "partition"}
_TOLD_LATE = 1.0  # seconds within which a process that was killed is found dead


class Step(NamedTuple):
    """A step that a learner finished."""

    time: float  # unix seconds
    clock: int  # the learner's, after the step
    tokens: int


@dataclasses.dataclass(frozen=True)
class Life:
    """One process of a target, from its start to its end; times in unix seconds."""

    target: str
    pid: int
    started: float
    ended: float | None = None  # None: it outlived the record
    code: int | None = None  # its exit code; minus the signal that killed it

    @property
    def killed(self) -> bool:
        """Whether a signal ended it."""
        return self.code is not None and self.code < 0

    def holds(self, time: float) -> bool:
        """Whether it lived then."""
        return self.started <= time and (self.ended is None or time < self.ended)


@dataclasses.dataclass(frozen=True)
class Blow:
    """A fault that struck; times in unix seconds."""

    time: float
    target: str
    kind: str  # "kill", "hang" or "partition"
    until: float | None = None  # when it was undone; None: never, as a kill


@dataclasses.dataclass(frozen=True)
class Trace:
    """Everything that the report is made from."""

    steps: Mapping[int, Sequence[Step]]  # by learner, in the order of time, each once
    rounds: Sequence[Mapping[str, Any]]  # lines of rounds.jsonl
    lives: Sequence[Life]  # in the order of their starts
    blows: Sequence[Blow]
    durable: Sequence[tuple[float, Sequence[int]]]  # each end of the syncer, and the versions it left
    damage: Sequence[str]  # what was wrong with the durable state at an end of the syncer
    missed: int  # faults whose target was not there
    storm: float | None  # when the plan of faults began

    def of(self, target: str) -> list[Life]:
        """The target's processes, in their order."""
        return [life for life in self.lives if life.target == target]


def read_trace(workdir: pathlib.Path, faults: pathlib.Path, learners: int) -> Trace:
    """Reads a run's steps and rounds from its workdir, and what befell it from the journal `faults`.

    Raises:
      OSError: there is no journal.
    """
    told = lines_of(faults.read_text())
    steps = {m: _steps(_lines(workdir / "learners" / str(m) / "steps.jsonl")) for m in range(learners)}
    blows = _blows(told)
    return Trace(
        steps=steps,
        rounds=_lines(workdir / "rounds.jsonl"),
        lives=_lives(told, blows),
        blows=blows,
        durable=[
            (line["time"], line["versions"]) for line in told if line["event"] == "end" and "versions" in line
        ],
        damage=[line["problem"] for line in told if "problem" in line],
        missed=sum(line["event"] == "missed" for line in told),
        storm=next((line["time"] for line in told if line["event"] == "storm"), None),
    )


def lines_of(text: str) -> list[dict[str, Any]]:
    """The JSON of each complete line; a last one that a killed process tore is left out."""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


def _lines(path: pathlib.Path) -> list[dict[str, Any]]:
    return lines_of(path.read_text()) if path.exists() else []


def _steps(told: Iterable[Mapping[str, Any]]) -> list[Step]:
    """A syncer that dies before its learners hear what it has written is told again: such lines are twice."""
    return sorted({Step(line["time"], line["step"], line["tokens"]) for line in told})


def _blows(told: Iterable[Mapping[str, Any]]) -> list[Blow]:
    blows: list[Blow] = []
    for line in told:
        event, target, time = line["event"], line["target"], line["time"]
        if event in KINDS:
            blows.append(Blow(time, target, event))
        elif event in _UNDO:
            for i, blow in enumerate(blows):
                if (blow.target, blow.kind, blow.until) == (target, _UNDO[event], None):
                    blows[i] = dataclasses.replace(blow, until=time)
    return blows


def _lives(told: Iterable[Mapping[str, Any]], blows: Sequence[Blow]) -> list[Life]:
    lives: list[Life] = []
    for line in told:
        if line["event"] == "start":
            lives.append(Life(line["target"], line["pid"], line["time"]))
        elif line["event"] == "end":
            for i, life in enumerate(lives):
                if (life.target, life.pid, life.ended) == (line["target"], line["pid"], None):
                    ended = _death(line["target"], life.started, line["time"], blows)
                    lives[i] = dataclasses.replace(life, ended=ended, code=line["code"])
    return lives


def _death(target: str, started: float, found: float, blows: Sequence[Blow]) -> float:
    """When a process died that was found dead: by the kill just before, if there was one."""
    since = max(started, found - _TOLD_LATE)
    kills = [b.time for b in blows if (b.target, b.kind) == (target, "kill") and since <= b.time <= found]
    return max(kills, default=found)


def syncer_deaths(trace: Trace) -> list[float]:
    """When a process of the syncer was killed."""
    return [life.ended for life in trace.of(SYNCER) if life.killed and life.ended is not None]
