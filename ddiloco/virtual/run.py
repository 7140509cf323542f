"""The virtual driver: real training steps in the order of a simulated clock, in one thread."""

from __future__ import annotations

import collections
import functools
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddiloco.disk.snapshots.books import Books
from ddiloco.disk.snapshots.store import Snapshot
from ddiloco.goodput.accounting import State
from ddiloco.observe import records
from ddiloco.outer.encoding import encoded_bytes
from ddiloco.outer.fragments import FragmentLayout, assemble
from ddiloco.outer.global_model import FragmentState, GlobalModel, InvalidContribution
from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Contribution
from ddiloco.protocol.state import SyncerState
from ddiloco.roles.assembly import Assembly
from ddiloco.roles.delivery import Pieces
from ddiloco.roles.evaluator import note_score
from ddiloco.roles.learner_arrays import Equipment, TrainingArrays
from ddiloco.roles.outcome import Outcome
from ddiloco.roles.syncer_worker import host_arrays
from ddiloco.roles.taping import FleetTapes, Tapes
from ddiloco.roles.transfer import FragmentSnapshot
from ddiloco.settings.experiment import Experiment
from ddiloco.virtual.fleet import Fleet
from ddiloco.virtual.from_settings import chips_by_learner, horizon, make_fleet
from ddiloco.virtual.ghosts import Relay
from ddiloco.virtual.learner_process import VirtualLearner
from ddiloco.virtual.ports import Held, Observer, Payload
from ddiloco.virtual.snapshot_return import VirtualReturn
from ddiloco.virtual.snapshots import (
    goes_on_exactly,
    make_snapshots,
    put_back_exactly,
    put_back_observers,
)

Record = Callable[[Any], None]


class GlobalArrays:
    """The syncer's arrays: a GlobalModel in host memory."""

    def __init__(self, model: GlobalModel, codec: str) -> None:
        """`codec`: of what the learners send, as in the model's own settings."""
        self.model = model
        self._encoded_sizes = encoded_bytes(model.layout, codec)

    def size(self, fragment: int) -> int:
        """Bytes of a global fragment on the wire."""
        return self.model.layout.bytes[fragment]

    def encoded_size(self, fragment: int) -> int:
        """Bytes of a learner's fragment on the wire."""
        return self._encoded_sizes[fragment]

    def fragments(self) -> list[Pieces]:
        """The pieces of all global fragments."""
        return [self.fragment(p) for p in range(self.model.layout.num_fragments)]

    def fragment(self, fragment: int) -> Pieces:
        """The pieces of a global fragment; they stay as they are through later merges."""
        return self.model.fragment(fragment)[1]

    def problem(self, fragment: int, payload: Payload) -> str | None:
        """Why a pulled fragment is unsound; None if it is sound."""
        try:
            self.model.validate(fragment, self._decoded(fragment, payload))
        except InvalidContribution as error:
            return str(error)
        return None

    def merge(self, fragment: int, given: Sequence[tuple[Contribution, Payload]]) -> Mapping[str, Any]:
        """Merges, and gives the outer step's metrics."""
        pieces = [self._decoded(fragment, payload) for _, payload in given]
        return self.model.merge(fragment, pieces, [(c.steps, c.tokens) for c, _ in given])[1]

    def state(self) -> Held:
        """`fragment/<p>/<i>` and `outer/<p>/<i>`, of `GlobalModel.state`, and the versions."""
        states = [self.model.state(p) for p in range(self.model.layout.num_fragments)]
        arrays = {f"fragment/{p}/{i}": x for p, s in enumerate(states) for i, x in enumerate(s.pieces)}
        arrays |= {f"outer/{p}/{i}": x for p, s in enumerate(states) for i, x in enumerate(s.optimizer)}
        return arrays, {"versions": [s.version for s in states]}

    def restore(self, arrays: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Takes over what `state` gave; raises ValueError if it is of another layout or optimizer."""
        found = collections.Counter(name.rpartition("/")[0] for name in arrays)
        for p, version in enumerate(values["versions"]):
            held = [
                tuple(arrays[f"{kind}/{p}/{i}"] for i in range(found[f"{kind}/{p}"]))
                for kind in ("fragment", "outer")
            ]
            self.model.restore(p, FragmentState(version, *held))

    def _decoded(self, fragment: int, snapshot: FragmentSnapshot) -> Pieces:
        # The version now is the one anchored on, or the core has dropped the contribution or will.
        return self.model.decode(fragment, host_arrays(snapshot.arrays), self.fragment(fragment))


class RecordingObserver(Observer):
    """Turns what happens in a fleet into the records of a run, and has the global model scored."""

    def __init__(
        self,
        record: Record,
        score_at: Callable[[int, int, float], None],
        tapes: FleetTapes | None = None,
    ) -> None:
        """`score_at` is told of every merge: the global step, tokens of all learners so far, the time."""
        self.tokens = 0
        self._tapes = tapes
        self._record = record
        self._score_at = score_at

    def syncer_handled(self, event: events.SyncerEvent, out: list[Any], now: float) -> None:
        """An event of the syncer."""
        if self._tapes is not None:
            self._tapes.syncer_handled(event, out, now)

    def learner_handled(
        self, learner: VirtualLearner, event: events.LearnerEvent, out: list[Any], now: float
    ) -> None:
        """An event of a learner."""
        if self._tapes is not None:
            donated = learner.arrays.donated
            self._tapes.learner_handled(learner.number, learner.process, event, out, now, donated)

    def pulled(self, learner: VirtualLearner, contribution: Contribution, now: float) -> None:
        """A snapshot that the syncer takes."""
        if self._tapes is not None:
            self._tapes.pulled(learner.number, contribution)

    def stepped(self, learner: int, clock: int, tokens: int, metrics: Mapping[str, Any], now: float) -> None:
        """A step."""
        self.tokens += tokens
        self._record(records.StepDone(learner, clock, now, tokens, metrics))

    def entered(self, learner: int, state: State, chips: int, now: float) -> None:
        """A state."""
        self._record(records.StateChanged(learner, state, now, chips))

    def noted(self, name: str, values: Mapping[str, Any], now: float) -> None:
        """A record of the protocol."""
        self._record(records.Noted(name, values, now))
        if name == "round":
            self._score_at(values["step"], self.tokens, now)

    def dropped(self, drop: actions.Drop, now: float) -> None:
        """Something that was not used."""
        self._record(records.Noted("drop", {"learner": drop.learner, "reason": drop.reason}, now))

    def transferred(self, learner: int, sent: int, received: int) -> None:
        """Bytes of fragments."""
        self._record(records.Transferred(learner, sent, received))


def play(
    fleet: Fleet, experiment: Experiment, observer: RecordingObserver, stop: threading.Event
) -> str | None:
    """Lets a fleet run until it is over, nothing can happen, or `stop` is set; why it failed, if so."""
    until = horizon(experiment)
    fleet.run(stop=lambda: stop.is_set() or fleet.calendar.now > until)
    now = fleet.calendar.now
    for learner, chips in chips_by_learner(experiment).items():
        process = fleet.processes.get(learner)
        if process is not None and process.alive:
            observer.entered(learner, State.FINISHED, chips, now)
    if fleet.over or stop.is_set():
        return None
    if not any(process.alive for process in fleet.processes.values()):
        return "every learner has died or left, and none returns"
    return f"the run is not over after {now:g} virtual seconds"


class VirtualRun:
    """One run of the decoupled family in virtual time; the same experiment gives the same parameters."""

    def __init__(
        self,
        assembly: Assembly,
        record: Record,
        stop: threading.Event,
        workdir: pathlib.Path | None = None,
        snapshot: Snapshot | None = None,
    ) -> None:
        """`workdir`: where tapes and snapshots go; None: none are kept. `snapshot`: what to go on from.

        A run that goes on exactly writes on the tapes of the one that it is the rest of.

        Raises:
          ConfigError: the snapshot holds no arrays, or is of another version of the program.
          DataError: it is of other data.
          SnapshotError: it has been damaged since it was opened, or is of another model.
        """
        e = self._experiment = assembly.experiment
        self._record = books = Books(record)
        self._stop = stop
        initial = assembly.initial_parameters()
        model = GlobalModel(assembly.layout, initial, e.outer, e.sync.num_learners)
        model.compile()
        self._arrays = GlobalArrays(model, e.outer.codec)
        equipment = assembly.equipment()
        self._score = assembly.scorer(equipment[0].program.mesh)
        self._next_score = self._score_after(0)
        self.learners: dict[int, TrainingArrays] = {}  # of each learner's newest process

        exactly = snapshot is None or goes_on_exactly(snapshot, e)
        back = None if exactly else VirtualReturn(snapshot, e, assembly.layout)
        self._tapes = self._fleet_tapes(workdir, assembly.layout, model, equipment, snapshot, back)
        self._observer = RecordingObserver(books, self._score_at, self._tapes)
        relay = Relay(self._observer)

        # One process after another of a learner draws from the same batches: each row is trained on once.
        def train(learner: int) -> TrainingArrays:
            erred = functools.partial(self._erred, learner)
            make = TrainingArrays if back is None else functools.partial(back.arrays, learner)
            self.learners[learner] = make(equipment[learner], erred)
            return self.learners[learner]

        self._fleet: Fleet = make_fleet(e, e.train.steps, train, self._arrays, relay, exactly)
        if snapshot is None:
            self._evaluate(0, 0, 0.0)
        else:
            put_back_observers(snapshot, books, self._observer)
            self._next_score = self._score_after(snapshot.header["step"])
            if back is None:
                put_back_exactly(self._fleet, relay, snapshot, self._tapes)
            else:
                back.begin(self._fleet, equipment, self._observer, self._tapes)
        self._snapshots = make_snapshots(
            workdir, e, assembly.layout, self._fleet, relay, books, self._observer, snapshot, self._tapes
        )

    def run(self) -> Outcome:
        """Trains to the last step, or until nothing more can happen or `stop` is set."""
        try:
            failure = play(self._fleet, self._experiment, self._observer, self._stop)
        finally:
            self._tapes.end()
            if self._snapshots is not None:
                self._snapshots.close()
        step = self._fleet.syncer.durable.step
        loss = self._evaluate(step, self._observer.tokens, self._fleet.calendar.now)
        return Outcome(self._arrays.model.parameters(), step, loss, self._fleet.over, failure)

    def _fleet_tapes(
        self,
        workdir: pathlib.Path | None,
        layout: FragmentLayout,
        model: GlobalModel,
        equipment: Sequence[Equipment],
        snapshot: Snapshot | None,
        back: VirtualReturn | None,
    ) -> FleetTapes:
        """The tapes; with `back`, the model is where the snapshot has it then."""
        exactly = snapshot is not None and back is None
        clock = {"clock": lambda: 0.0, "wall": lambda: 0.0}
        tapes = Tapes(workdir, self._experiment, layout, self._record, **clock, goes_on=exactly)
        if back is None:
            return FleetTapes(tapes, SyncerState.initial(layout.num_fragments), model, equipment)
        return FleetTapes(tapes, back.restore(model), model, equipment, snapshot.name)

    def _score_at(self, step: int, tokens: int, now: float) -> None:
        every, last = self._experiment.eval.every, self._experiment.train.steps
        if every and self._next_score <= step < last:  # the last one is scored when all is over
            self._next_score = self._score_after(step)
            self._evaluate(step, tokens, now)

    def _score_after(self, step: int) -> int:
        every = self._experiment.eval.every
        return (step // every + 1) * every if every else 0

    def _erred(self, learner: int, step: int, devices: list[str]) -> None:
        for found in records.corruption(learner, step, devices, self._fleet.calendar.now):
            self._record(found)

    def _evaluate(self, step: int, tokens: int, now: float) -> float | None:
        params = assemble(self._arrays.model.layout, self._arrays.fragments())
        return note_score(self._score(params), step, tokens, now, self._record)


def run_virtual(
    assembly: Assembly,
    record: Record,
    stop: threading.Event,
    workdir: pathlib.Path | None = None,
    snapshot: Snapshot | None = None,
) -> Outcome:
    """Makes and runs a VirtualRun; raises as that does."""
    return VirtualRun(assembly, record, stop, workdir, snapshot).run()
