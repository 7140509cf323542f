"""Learners that lie: what one of them does to a run in virtual time, with the guard and without it."""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddiloco.outer.guards import GuardConfig
from ddiloco.run.recipes import assembly_of
from ddiloco.settings.experiment import Experiment, parse, to_json
from ddiloco.telemetry import records
from ddiloco.virtual.run import VirtualRun
from ddiloco.workers.exchange import Pieces
from ddiloco.workers.learner_arrays import Equipment, TrainingArrays
from ddiloco.workers.run_result import Outcome
from ddiloco.workers.transfer import Offer

Arrays = tuple[np.ndarray, ...]
Falsify = Callable[[np.random.Generator, Arrays, Arrays, Arrays], Arrays]


def _scaled(factor: float) -> Falsify:
    def falsify(rng: np.random.Generator, theta: Arrays, own: Arrays, first: Arrays) -> Arrays:
        return tuple(t + np.float32(factor) * (x - t) for t, x in zip(theta, own, strict=True))

    return falsify


def _random(rng: np.random.Generator, theta: Arrays, own: Arrays, first: Arrays) -> Arrays:
    sent = []
    for t, x in zip(theta, own, strict=True):
        noise = rng.standard_normal(t.shape, np.float32)
        length = max(float(np.linalg.norm(noise)), 1e-30)
        sent.append(t + noise * np.float32(np.linalg.norm(x - t) / length))
    return tuple(sent)


# What a liar sends in the place of an offer of the codec f32: from what an offer without work holds, the
# honest offer, and the first honest one.
KINDS: dict[str, Falsify] = {
    "scaled": _scaled(1e6),
    "scaled little": _scaled(4.0),  # as much as the guard lets pass
    "flipped": _scaled(-1.0),
    "flipped and scaled": _scaled(-100.0),
    "random": _random,
    "stale replay": lambda rng, theta, own, first: first,
    "nan in one tensor": lambda rng, theta, own, first: (np.full_like(own[0], np.nan), *own[1:]),
}


class LyingArrays(TrainingArrays):
    """A learner that trains like any other, and sends something else."""

    def __init__(self, equipment: Equipment, kind: str) -> None:
        """`kind`: one of KINDS."""
        super().__init__(equipment)
        self._falsify, self._rng = KINDS[kind], np.random.default_rng(0)
        self._unmoved: dict[int, Arrays] = {}  # by fragment: Theta_p, or with rebase zeros
        self._first: dict[int, Arrays] = {}

    def adopt(self, fragments: Sequence[Pieces], inner: Sequence[np.ndarray] | None = None) -> None:
        super().adopt(fragments, inner)
        for p, pieces in enumerate(fragments):
            self._hold(p, pieces)

    def apply(
        self, fragment: int, mixing: float, pieces: Pieces, merged: int | None = None, rebase: bool = False
    ) -> None:
        super().apply(fragment, mixing, pieces, merged, rebase)
        self._hold(fragment, pieces)

    def _hold(self, fragment: int, pieces: Pieces) -> None:
        moves = self._equipment.transfer.keeps_anchors
        self._unmoved[fragment] = tuple(map(np.zeros_like, pieces)) if moves else tuple(pieces)

    def offer(self, fragment: int, steps: int) -> Offer:
        honest = super().offer(fragment, steps)
        own = honest.on_host()
        first = self._first.setdefault(fragment, own)
        sent = self._falsify(self._rng, self._unmoved[fragment], own, first)
        lie = dataclasses.replace(honest, arrays=tuple(sent), shapes=())
        self._offers[fragment][steps] = lie
        return lie


class LyingRun(VirtualRun):
    """A run in virtual time of which some learners lie."""

    def __init__(self, *arguments: Any, liars: dict[int, str]) -> None:
        self._liars = liars
        super().__init__(*arguments)

    def _start(self, learner: int) -> TrainingArrays:
        if learner not in self._liars:
            return super()._start(learner)
        return LyingArrays(self._equipment[learner], self._liars[learner])


@dataclasses.dataclass(frozen=True)
class LiarOutcome:
    """What became of a run."""

    loss: float  # of the global model on held-out rows, at the end
    length: float  # norm of all its parameters
    rounds: int  # merges
    offers: int  # in a merge, also in one that left all out
    left_out: dict[int, int]  # of those, the ones that were not merged, by learner
    quarantined: tuple[int, ...]  # learners that were in quarantine at some time
    alarms: tuple[str, ...]  # in the order in which they were raised, each once


def run(experiment: Experiment, liars: dict[int, str]) -> LiarOutcome:
    """Trains to the end with these liars."""
    taken: list[Any] = []
    job = LyingRun(assembly_of(experiment), taken.append, threading.Event(), liars=liars)
    return outcome(taken, job.run())


def outcome(taken: Sequence[Any], ended: Outcome) -> LiarOutcome:
    """Figures of a run, from its records and its result."""
    squares = sum(float(np.square(x, dtype=np.float64).sum()) for x in ended.params.values())
    notes = [record for record in taken if isinstance(record, records.Noted)]
    rounds = [note.values for note in notes if note.name == "round"]
    tried = [note.values for note in notes if note.name in ("round", "round_refused")]
    left_out = collections.Counter(learner for values in tried for learner in values.get("left_out", ()))
    return LiarOutcome(
        loss=ended.eval_loss,
        length=math.sqrt(squares),
        rounds=len(rounds),
        offers=sum(len(values["learners"]) for values in rounds) + left_out.total(),
        left_out=dict(left_out),
        quarantined=tuple(
            sorted({note.values["learner"] for note in notes if note.name == "guard_quarantined"})
        ),
        alarms=tuple(dict.fromkeys(r.sentence for r in taken if isinstance(r, records.Alarm))),
    )


def without_gates(experiment: Experiment) -> Experiment:
    """The same, with every finite offer merged."""
    outer = dataclasses.replace(experiment.outer, guard=GuardConfig(gates=()))
    return dataclasses.replace(experiment, outer=outer)


def without_the_last(experiment: Experiment) -> Experiment:
    """The same without its last learner; raises ConfigError where a setting needs that one."""
    settings = to_json(experiment)
    settings["sync"]["num_learners"] -= 1
    return parse(settings)
