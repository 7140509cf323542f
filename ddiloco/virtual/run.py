"""The virtual driver: real training steps in the order of a simulated clock, in one thread."""

from __future__ import annotations

import math
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ddiloco.config import ConfigError
from ddiloco.goodput.accounting import State
from ddiloco.outer.encoding import Traffic, traffic
from ddiloco.outer.global_model import GlobalModel, NextVersion, pieces_sha256
from ddiloco.outer.guards import Notice
from ddiloco.outer.offers import MeasuredOffer
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.protocol.state import SyncerState
from ddiloco.settings.experiment import Experiment, task_of
from ddiloco.storage.tape.recorder import LearnerTape
from ddiloco.telemetry import records
from ddiloco.virtual.array_ports import CountingLearner, CountingSyncer, Observer
from ddiloco.virtual.fleet import Fleet
from ddiloco.virtual.from_settings import chips_by_learner, make_fleet, merge_timeout
from ddiloco.virtual.learner_process import VirtualLearner
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.evaluator import Evaluations
from ddiloco.workers.exchange import Pieces
from ddiloco.workers.learner_arrays import Equipment, Erred, TrainingArrays
from ddiloco.workers.run_result import Outcome
from ddiloco.workers.tapes import Tapes
from ddiloco.workers.transfer import Offer, host_arrays

Record = Callable[[Any], None]


class GlobalArrays:
    """The syncer's arrays: a GlobalModel in host memory."""

    def __init__(self, model: GlobalModel, config: OuterConfig) -> None:
        """`config`: the model's own."""
        self.model = model
        self.traffic = traffic(model.layout, config)

    def fragment(self, fragment: int) -> Pieces:
        """The pieces of a global fragment; they stay as they are through later merges."""
        return self.model.fragment(fragment)[1]

    def received(self, fragment: int, payload: Offer, learner: int) -> MeasuredOffer:
        """A learner's fragment; raises InvalidContribution if it is unsound."""
        # A difference is against the present version; if not, the core drops the offer.
        return self.model.read(fragment, payload.on_host(), learner)

    def merge(
        self, fragment: int, given: Sequence[tuple[Contribution, MeasuredOffer]], interval: int | None
    ) -> NextVersion:
        """Merges what the guard lets pass."""
        counts, learners = [(c.steps, c.tokens) for c, _ in given], [c.learner for c, _ in given]
        return self.model.merge(fragment, [offer for _, offer in given], counts, learners, interval)


class RecordingObserver(Observer):
    """Turns what happens in a fleet into the records of a run."""

    def __init__(
        self, record: Record = lambda record: None, merged: Callable[[int], None] = lambda step: None
    ) -> None:
        """`merged` is called with the global step of every merge."""
        self.tokens = 0  # that all learners have trained on
        self.clock = 0  # of the furthest
        self.stepped_at = self.merged_at = 0.0  # when the last step and the last round were
        self._record = record
        self._merged = merged

    def stepped(self, learner: int, clock: int, tokens: int, metrics: Mapping[str, Any], now: float) -> None:
        self.tokens += tokens
        self.clock = max(self.clock, clock)
        self.stepped_at = now
        self._record(records.StepDone(learner, clock, now, tokens, metrics))

    def entered(self, learner: int, state: State, chips: int, now: float) -> None:
        self._record(records.StateChanged(learner, state, now, chips))

    def noted(self, name: str, values: Mapping[str, Any], now: float) -> None:
        self._record(records.Noted(name, values, now))
        if name == "round":
            self.merged_at = now
            self._merged(values["step"])

    def guarded(self, round_id: RoundId, notices: Sequence[Notice], now: float) -> None:
        for record in records.guarded(notices, round_id, now):
            self._record(record)

    def transferred(self, learner: int, sent: int, received: int) -> None:
        self._record(records.Transferred(learner, sent, received))


def play(
    fleet: Fleet, experiment: Experiment, observer: RecordingObserver, stop: threading.Event
) -> str | None:
    """Runs a fleet until it is over, nothing can happen, or `stop` is set; returns why it failed, or None."""
    timeout = merge_timeout(experiment, fleet.syncer.arrays.traffic)
    fleet.run(stop=lambda: stop.is_set() or fleet.calendar.now > observer.merged_at + timeout)
    now = fleet.calendar.now
    for learner, chips in chips_by_learner(experiment).items():
        process = fleet.processes.get(learner)
        if process is not None and process.alive:
            observer.entered(learner, State.FINISHED, chips, now)
    if fleet.over or stop.is_set():
        return None
    if not any(process.alive for process in fleet.processes.values()):
        return "every learner has died or left, and none returns"
    return f"nothing has been merged from {observer.merged_at:g} to {now:g} virtual seconds"


class TapingObserver(RecordingObserver):
    """Writes a fleet's tapes, too; their clock and wall clock are virtual time."""

    def __init__(
        self,
        workdir: pathlib.Path | None,
        experiment: Experiment,
        model: GlobalModel,
        equipment: Sequence[Equipment],
        record: Record,
        merged: Callable[[int], None],
    ) -> None:
        """Without a workdir, or where the settings say so, no tapes are written."""
        super().__init__(record, merged)
        self._tapes = Tapes(workdir, experiment, model.layout, record, clock=lambda: 0.0, wall=lambda: 0.0)
        self._model, self._equipment = model, equipment
        self._syncer = self._tapes.syncer(SyncerState.initial(model.layout.num_fragments), model)
        self._versions = [0] * model.layout.num_fragments  # that the tape has
        self._learners: dict[int, tuple[int, LearnerTape]] = {}  # by number: newest process and its tape

    def syncer_handled(
        self, event: events.SyncerEvent, out: Sequence[actions.SyncerAction], now: float, shard: int = 0
    ) -> None:
        self._syncer.heard(event, out, now)
        if isinstance(event, events.MergeFinished) and self._syncer.on:
            p, (version, pieces) = event.round.fragment, self._model.fragment(event.round.fragment)
            if version > self._versions[p]:  # else nothing was merged
                self._versions[p] = version
                self._syncer.committed(p, version, pieces_sha256(pieces))

    def learner_handled(
        self,
        learner: VirtualLearner,
        event: events.LearnerEvent,
        out: Sequence[actions.LearnerAction],
        now: float,
    ) -> None:
        self._tape(learner.number, learner.process).heard(event, now)

    def recovered(self, learner: VirtualLearner, donor: VirtualLearner | None, now: float) -> None:
        """A learner loads its welcome, with the donor's present inner state; None: a fresh one."""
        origin = None if donor is None else self._tape(donor.number, donor.process).gave()
        self._tape(learner.number, learner.process).adopted(origin is None, origin)
        values = {"learner": learner.number, "inner_state": "fresh" if donor is None else "peer"}
        self.noted("recovered", values, now)

    def end(self) -> None:
        """The run is over."""
        for _, tape in self._learners.values():
            tape.close()
        self._syncer.end([self._model.fragment(p)[0] for p in range(self._model.layout.num_fragments)])

    def _tape(self, learner: int, process: int) -> LearnerTape:
        newest, tape = self._learners.get(learner, (None, None))
        if newest != process:
            if tape is not None:
                tape.close()
            tape = self._tapes.learner(learner, process, self._equipment[learner])
            self._learners[learner] = process, tape
        return tape


class _Arrays(TrainingArrays):
    """The arrays of one process of a learner, which joins with the inner state of `recovery`."""

    def __init__(
        self, equipment: Equipment, erred: Erred, recovery: Callable[[], Sequence[np.ndarray] | None]
    ) -> None:
        super().__init__(equipment, erred)
        self._recovery = recovery

    def adopt(self, fragments: Sequence[Pieces], inner: Sequence[np.ndarray] | None = None) -> None:
        super().adopt(fragments, self._recovery() if inner is None else inner)


class VirtualRun:
    """One run of the decoupled family in virtual time; the same experiment gives the same parameters."""

    def __init__(
        self,
        assembly: Assembly,
        record: Record,
        stop: threading.Event,
        workdir: pathlib.Path | None = None,
    ) -> None:
        """`workdir`: where tapes go; None: there are no tapes."""
        e = self._experiment = assembly.experiment
        self._record, self._stop = record, stop
        model = assembly.global_model(assembly.initial_parameters())
        self._arrays = GlobalArrays(model, e.outer)
        self._equipment = assembly.equipment()
        self._data_begin = [equipment.batches.get_state() for equipment in self._equipment]
        self.score = assembly.scorer(self._equipment[0].program.mesh)
        self.learners: dict[int, TrainingArrays] = {}  # of each learner's newest process
        self._observer = TapingObserver(workdir, e, model, self._equipment, record, self._merged)
        self._fleet: Fleet = make_fleet(e, e.train.steps, self._start, self._arrays, self._observer)
        calendar = self._fleet.calendar
        self._evaluations = Evaluations(self.score, e.eval.every, record, clock=lambda: calendar.now)
        self.evaluate(0)

    def run(self) -> Outcome:
        """Trains to the last step, or until nothing more can happen or `stop` is set."""
        try:
            failure = play(self._fleet, self._experiment, self._observer, self._stop)
        finally:
            self._observer.end()
        step = self._fleet.syncer.durable.step
        loss = self.evaluate(step)
        return Outcome(self._arrays.model.parameters(), step, loss, self._fleet.over, failure)

    def evaluate(self, step: int) -> float:
        """Scores the global model as it is now, at this global step; returns the loss."""
        return self._evaluations.evaluate(step, self._observer.tokens, self._arrays.model.parameters())

    def _merged(self, step: int) -> None:
        if step < self._experiment.train.steps and self._evaluations.due(step):  # the last comes at the end
            self.evaluate(step)

    def _start(self, learner: int) -> TrainingArrays:
        """Arrays of a learner's next process, whose data begin where the welcome says, or at their start."""
        if (begin := self._data_begin[learner]) is not None:
            self._equipment[learner].batches.set_state(begin)

        def erred(step: int, devices: list[str]) -> None:
            for found in records.corruption(learner, step, devices, self._fleet.calendar.now):
                self._record(found)

        recovery = partial(self._inner_state, learner)
        self.learners[learner] = _Arrays(self._equipment[learner], erred, recovery)
        return self.learners[learner]

    def _inner_state(self, learner: int) -> Sequence[np.ndarray] | None:
        """What a learner that joins gets of the furthest other, as from a peer; None: a fresh one.

        Before the first merge all begin alike.
        """
        others = [p for m, p in self._fleet.processes.items() if m != learner]
        begun = any(self._fleet.syncer.durable.versions)
        peers = [p for p in others if begun and p.alive and p.core.recovered]
        donor = max(peers, key=lambda p: p.core.clock, default=None)
        self._observer.recovered(self._fleet.processes[learner], donor, self._fleet.calendar.now)
        return None if donor is None else host_arrays(donor.arrays.inner())  # type: ignore[attr-defined]


def run_without_arrays(
    experiment: Experiment, traffic: Traffic, record: Record, stop: threading.Event
) -> Outcome:
    """Plays the run; batches count as full."""
    observer = RecordingObserver(record)
    fleet = counting_fleet(experiment, experiment.train.steps, traffic, observer)
    failure = play(fleet, experiment, observer, stop)
    return Outcome(None, fleet.syncer.durable.step, None, fleet.over, failure)


def rehearse(experiment: Experiment, traffic: Traffic) -> int:
    """Number of global steps of the fleet within its budget of tokens or time; nothing is trained.

    A run of that many steps spends nearest to a budget of tokens, and takes its last step within one of time:
    the rehearsal ends when the budget is spent, but a run continues until slower learners are done.

    `traffic`: bytes of each fragment. Batches count as full; a real run differs by its padding.

    Raises:
      ConfigError: the fleet dies before it has spent its tokens.
    """
    observer = RecordingObserver()
    fleet = counting_fleet(experiment, None, traffic, observer)
    tokens, seconds = experiment.train.tokens, experiment.virtual.seconds
    timeout = merge_timeout(experiment, traffic)
    spent = math.inf if tokens is None else tokens
    if seconds is not None:  # time stops there first, and no later step counts
        fleet.calendar.at(math.nextafter(seconds, math.inf), lambda: None)

    def over() -> bool:
        return observer.tokens >= spent or fleet.calendar.now > (seconds or observer.stepped_at + timeout)

    fleet.run(stop=over)
    if tokens is not None and observer.tokens < tokens:
        raise ConfigError(
            f"config.train.tokens: is {tokens}, but the fleet of config.virtual comes to {observer.tokens} "
            f"in {fleet.calendar.now:g} virtual seconds"
        )
    steps = max(1, observer.clock)

    def run(steps: int) -> RecordingObserver:
        """The observer of a whole run of so many steps."""
        observer = RecordingObserver()
        fleet = counting_fleet(experiment, steps, traffic, observer)
        play(fleet, experiment, observer, threading.Event())
        return observer

    if seconds is not None:
        return _nearest(seconds, steps, lambda steps: run(steps).stepped_at, within=True)
    return _nearest(spent, steps, lambda steps: run(steps).tokens)


def _nearest(budget: float, most: int, spent: Callable[[int], float], within: bool = False) -> int:
    """The number of steps, from 1 to `most`, that spends nearest to the budget; of two, the higher.

    Args:
      spent: what a run of so many steps spends. It is asked where a straight line would have the budget.
      within: whether no more than the budget may be spent, but for the first step.
    """
    (low, few), (high, many) = (0, 0.0), (most, spent(most))
    while many > budget and high - low > 1:
        steps = max(low + 1, low + int((budget - few) * (high - low) / (many - few)))
        found = spent(steps)
        if found > budget:
            high, many = steps, found
        else:
            low, few = steps, found
    beyond = many - budget
    return low if low and beyond > 0 and (within or budget - few < beyond) else high


def counting_fleet(
    experiment: Experiment, total_steps: int | None, traffic: Traffic, observer: Observer
) -> Fleet:
    """The experiment's fleet without arrays; batches count as full."""
    length = task_of(experiment).row_tokens
    return make_fleet(
        experiment,
        total_steps,
        lambda learner: CountingLearner(lambda: experiment.batch_size(learner) * length),
        CountingSyncer(traffic),
        observer,
    )
