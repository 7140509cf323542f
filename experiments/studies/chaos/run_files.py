"""What a run of processes under faults has left behind, as read from its files."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ddiloco.telemetry.files import read_values
from experiments.studies.chaos.processes import KINDS, SYNCER, learner_name

_UNDO = {"resume": "hang", "heal": "partition"}
_FOUND_LATE = 1.0  # seconds within which a process that was killed is found dead


class Mark(NamedTuple):
    """A sign of life: a step that a learner finished, or a round that the syncer merged."""

    time: float  # unix seconds
    clock: int = 0  # the learner's, after the step
    tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Life:
    """One process of a target, from its start to its end; times in unix seconds."""

    target: str
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

    marks: Mapping[str, Sequence[Mark]]  # by target, the syncer last; in the order of time, each once
    rounds: Sequence[Mapping[str, Any]]  # lines of rounds.jsonl
    lives: Sequence[Life]  # in the order of their starts
    blows: Sequence[Blow]
    durable: Sequence[tuple[float, Sequence[int]]]  # each end of the syncer, and the versions it left
    damage: Sequence[str]  # what was wrong with the durable state at an end of the syncer
    missed: int  # faults whose target was not there

    @property
    def learners(self) -> list[str]:
        """The targets that are learners, in the order of their numbers."""
        return [target for target in self.marks if target != SYNCER]

    def of(self, target: str) -> list[Life]:
        """The target's processes, in their order."""
        return [life for life in self.lives if life.target == target]

    def marks_in(self, life: Life) -> list[Mark]:
        """The signs of life of one process."""
        return [mark for mark in self.marks[life.target] if life.holds(mark.time)]


def read_trace(workdir: pathlib.Path, faults: pathlib.Path, learners: int) -> Trace:
    """Reads a run's steps and rounds from its workdir, and what befell it from the journal `faults`.

    What other learners than the first `learners` have contributed is left out.
    """
    journal = list(read_values(faults))
    rounds = [
        {**line, "contributions": [c for c in line["contributions"] if c[0] < learners]}
        for line in read_values(workdir / "rounds.jsonl")
    ]
    steps = {
        learner_name(m): _steps(read_values(workdir / "learners" / str(m) / "steps.jsonl"))
        for m in range(learners)
    }
    blows = _blows(journal)
    return Trace(
        marks={**steps, SYNCER: [Mark(line["time"]) for line in rounds]},
        rounds=rounds,
        lives=_lives(journal, blows),
        blows=blows,
        durable=[(line["time"], line["versions"]) for line in journal if "versions" in line],
        damage=[line["problem"] for line in journal if "problem" in line],
        missed=sum(line["event"] == "missed" for line in journal),
    )


def _steps(lines: Iterable[Mapping[str, Any]]) -> list[Mark]:
    """Learners report again what a syncer had written but not confirmed as it died: such lines are twice."""
    return sorted({Mark(line["time"], line["step"], line["tokens"]) for line in lines})


def _blows(journal: Iterable[Mapping[str, Any]]) -> list[Blow]:
    blows: list[Blow] = []
    for line in journal:
        event, target, time = line["event"], line["target"], line["time"]
        if event in KINDS:
            blows.append(Blow(time, target, event))
        elif event in _UNDO:
            blows = [
                dataclasses.replace(blow, until=time)
                if (blow.target, blow.kind, blow.until) == (target, _UNDO[event], None)
                else blow
                for blow in blows
            ]
    return blows


def _lives(journal: Iterable[Mapping[str, Any]], blows: Sequence[Blow]) -> list[Life]:
    lives: dict[tuple[str, int], list[Life]] = {}
    for line in journal:
        own = lives.setdefault((line["target"], line.get("pid")), [])
        if line["event"] == "start":
            own.append(Life(line["target"], line["time"]))
        elif line["event"] == "end" and own and own[-1].ended is None:
            ended = _death(own[-1], line["time"], blows)
            own[-1] = dataclasses.replace(own[-1], ended=ended, code=line["code"])
    return sorted((life for own in lives.values() for life in own), key=lambda life: life.started)


def _death(life: Life, found: float, blows: Sequence[Blow]) -> float:
    """When a process died that was found dead: by the kill just before, if there was one."""
    since = max(life.started, found - _FOUND_LATE)
    kills = [b.time for b in blows if (b.target, b.kind) == (life.target, "kill")]
    return max((time for time in kills if since <= time <= found), default=found)
