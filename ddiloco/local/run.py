"""The local driver: all roles in one process, a thread for each learner and one for the syncer."""

from __future__ import annotations

import concurrent.futures
import operator
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from etils import epath

from ddiloco.goodput.accounting import State
from ddiloco.goodput.waits import waiting
from ddiloco.outer.fragments import assemble
from ddiloco.protocol import events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.storage import run_mark
from ddiloco.storage.durable import FOLDER as DURABLE
from ddiloco.storage.durable import DurableState
from ddiloco.storage.learner_state import LearnerState, LearnerStates
from ddiloco.storage.snapshots.resuming import snapshot_header
from ddiloco.storage.snapshots.store import FOLDER, Snapshot
from ddiloco.telemetry import records
from ddiloco.telemetry.files import read_json
from ddiloco.telemetry.trimming import SUMMARY
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.checkpointing import Checkpointing
from ddiloco.workers.durable_start import durable_start
from ddiloco.workers.evaluator import Evaluations, Evaluator
from ddiloco.workers.exchange import Delivery, EventDelivery, InnerState, Leave, Pieces
from ddiloco.workers.learner_arrays import Equipment
from ddiloco.workers.learner_worker import Checkpoints, LearnerWorker
from ddiloco.workers.resuming import Origin, about_states, from_checkpoint, inner_of, run_of
from ddiloco.workers.run_result import Outcome
from ddiloco.workers.snapshots.recording import LearnerRecording
from ddiloco.workers.snapshots.taking import SnapshotTaker
from ddiloco.workers.syncer_worker import SyncerWorker
from ddiloco.workers.tapes import Tapes
from ddiloco.workers.transfer import Offer

_LEAVE_SECONDS = 60.0  # for threads to end after Leave; a hung device must not hold up the others


class LocalLink:
    """Reaches a learner in the same process."""

    def __init__(self, learner: int, worker: LearnerWorker, record: Callable[[Any], None]) -> None:
        self._learner, self._worker, self._record = learner, worker, record

    def deliver(self, delivery: Delivery) -> None:
        """Puts it into the learner's inbox; recorded are the bytes that a wire would move."""
        self._worker.inbox.put(delivery)
        if isinstance(delivery, EventDelivery) and delivery.fragments:
            moved = [delivery.difference] if delivery.difference else delivery.fragments
            size = sum(array.nbytes for arrays in moved for array in arrays)
            self._record(records.Transferred(self._learner, sent=0, received=size))

    def begun(self, incarnation: int) -> None:
        """Nothing follows: threads of one process do not give each other inner states."""


class LocalOffers:
    """Hands a learner's offers to the syncer in the same process, once they are in host memory."""

    def __init__(self, senders: concurrent.futures.Executor, syncer: SyncerWorker) -> None:
        self._senders, self._syncer = senders, syncer
        self._lock = threading.Lock()
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """How many no sender has taken yet."""
        return self._waiting

    def send(self, round_id: RoundId, contribution: Contribution, offer: Offer) -> None:
        """Sends an offer; never waits."""
        with self._lock:
            self._waiting += 1
        self._senders.submit(self._send, round_id, contribution, offer)

    def _send(self, round_id: RoundId, contribution: Contribution, offer: Offer) -> None:
        with self._lock:
            self._waiting -= 1
        try:
            arrays = offer.on_host()
        except Exception as error:  # of the devices
            c = contribution
            self._syncer.send(events.OfferFailed(round_id, c.learner, c.incarnation, str(error)))
            return
        self._syncer.take_offer(events.FragmentArrived(round_id, contribution), arrays)


class LocalRun:
    """One run of the decoupled family; `run` returns when it ends or `stop` is set."""

    def __init__(
        self,
        assembly: Assembly,
        record: Callable[[Any], None],
        stop: threading.Event,
        workdir: pathlib.Path | None = None,
        snapshot: Snapshot | None = None,
    ) -> None:
        """`workdir`: for merged fragments, tapes and snapshots; None: nothing is kept.

        A run that has begun in the workdir goes on. `snapshot`: what it resumes from instead.

        Raises:
          ConfigError: the disk refuses.
          DataError: the snapshot is of other data.
          DurableStateError, RunMarkError: the run in the workdir cannot go on.
          SnapshotError: the snapshot is damaged.
        """
        e = assembly.experiment
        self._assembly, self._record, self._stop, self._workdir = assembly, record, stop, workdir
        compiler = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="compile")
        equipment = compiler.submit(assembly.equipment)  # beside the syncer's part
        compiler.shutdown(wait=False)
        origin = None if snapshot is None else Origin(snapshot, e, assembly.layout)
        earlier = None if workdir is None else run_mark.begun(workdir / DURABLE)
        self._resumes = origin is not None or earlier is not None
        self._run = run_of(snapshot) if earlier is None else earlier.run
        self._tapes = Tapes(workdir, e, assembly.layout, record, run=self._run)
        durable, state = None, None
        if workdir is None:
            self._model = assembly.global_model(assembly.initial_parameters())
        else:
            kept = e.recovery.keep_versions
            durable = DurableState(workdir / DURABLE, assembly.layout, record, stop, self._run, kept)
            self._model, state = durable_start(assembly, durable, earlier is not None, snapshot, record)
        lineage = 0 if durable is None else durable.lineage
        core = SyncerCore(e.sync, e.train.steps, state, lineage)
        self._learners: list[LearnerWorker] = []
        self._tokens_before = 0  # trained by earlier processes, of which the learners of this one do not know
        score = assembly.scorer(assembly.learner_meshes()[0])
        self._last_evaluation = Evaluations(score, 0, record)
        self._scoring_learner = assembly.evaluation_learner()
        score = assembly.scorer(assembly.evaluation_mesh(), self._between_steps)
        self._evaluator = Evaluator(score, e.eval.every, self._tokens_so_far, self._record, core.step)
        if not self._resumes:
            with waiting("the first evaluation"):  # also compiles it, before the learners need the CPU
                self._evaluator.evaluate(0, self._model.parameters())
        self._resumed_from = None if snapshot is None else snapshot.name
        tape = self._tapes.syncer(core.state(), self._model, self._resumed_from, lineage)
        self._syncer = SyncerWorker(core, self._model, self._record, self._committed, durable, tape)
        self._taker = self._snapshots(workdir, core.step)
        with waiting("learners and merge to compile"):
            self._model.compile()
            compiled = equipment.result()
        self._senders = concurrent.futures.ThreadPoolExecutor(len(compiled), thread_name_prefix="offers")
        self._learners = self._make_learners(compiled, origin)
        for event in core.lost_for_good(lambda learner: learner >= len(self._learners)):  # of before
            self._syncer.send(event)
        if origin is not None:
            self._tokens_before = sum(origin.tokens.values()) - sum(lr.tokens for lr in self._learners)
        elif self._resumes:
            before = read_json(workdir / SUMMARY).get("tokens", {})
            self._tokens_before = sum(before.values())

    def run(self) -> Outcome:
        """Trains to the last step, or until all learners are dead or `stop` is set."""
        self._evaluator.start()
        for learner in self._learners:
            learner.start()
        try:
            if self._resumes:
                self._gather()
            self._syncer.start()
            while not self._over():
                self._syncer.ended.wait(0.2)
        finally:  # also when the caller is interrupted, who may go on: a notebook's cell
            self._end()
        params, step = self._model.parameters(), self._syncer.core.step
        with waiting("the last evaluation"):
            loss = self._last_evaluation.evaluate(step, self._tokens_so_far(), params)
        return Outcome(params, step, loss, finished=self._syncer.core.finished, failure=self._failure())

    def _end(self) -> None:
        for learner in self._learners:
            learner.inbox.put(Leave())
        for learner in self._learners:
            with waiting(f"learner {learner.core.learner} to leave"):
                left = learner.join(_LEAVE_SECONDS)
            if not left:
                reason = f"it did not leave within {_LEAVE_SECONDS:.0f} s"
                number, now = learner.core.learner, time.time()
                self._record(records.StateChanged(number, State.FAILED, now))
                self._record(records.LearnerDied(number, now, reason))
        with waiting("the last merges and snapshot"):
            self._syncer.stop(_LEAVE_SECONDS)
        self._senders.shutdown(wait=False, cancel_futures=True)
        with waiting("an evaluation"):
            self._evaluator.stop(_LEAVE_SECONDS)

    def _snapshots(self, workdir: pathlib.Path | None, step: int) -> SnapshotTaker | None:
        """Makes what takes the run's snapshots, if they are wanted."""
        e = self._assembly.experiment
        if workdir is None or not e.snapshot.every:
            return None
        header = snapshot_header(e, self._assembly.layout, self._run)
        folder = workdir / FOLDER
        keep_also = self._resumed_from if e.tape.enabled else None
        taker = SnapshotTaker(
            folder,
            e.snapshot,
            header,
            step,
            lambda m: self._syncer.send(m),
            self._record,
            keep_also,
            steps_in_flight=e.train.steps_in_flight,
        )
        self._syncer.take_snapshots(taker)
        return taker

    def _make_learners(self, equipment: Sequence[Equipment], origin: Origin | None) -> list[LearnerWorker]:
        e = self._assembly.experiment
        positions = [None] * len(equipment) if origin is None else origin.positions(e)
        begun = enumerate(zip(equipment, positions, strict=True))
        return [self._add_learner(m, parts, position, origin) for m, (parts, position) in begun]

    def _add_learner(
        self,
        learner: int,
        equipment: Equipment,
        position: dict[str, Any] | None,
        origin: Origin | None,
    ) -> LearnerWorker:
        """`position`: where its batches begin, if the run resumes, from `origin`."""
        e = self._assembly.experiment
        incarnation = 1
        if origin is not None:
            incarnation = origin.incarnation(learner)
        elif self._resumes:  # above all before: one that was killed as it began is on no disk, but has a tape
            known = dict(self._syncer.core.state().incarnations)
            incarnation = max(1 + known.get(learner, 0), time.time_ns() // 1000)
        core = LearnerCore(learner, incarnation, e.sync, e.train.steps)

        def send(event: events.SyncerEvent) -> None:
            if isinstance(event, events.LearnerJoined):  # for the first time, or again with a new incarnation
                self._syncer.connect(learner, event.incarnation, link)
            self._syncer.send(event)

        taker = self._taker
        if position is not None:
            equipment.batches.set_state(position)
        resumed = None if origin is None else origin.learner(learner, position, equipment.transfer)
        folder = None if self._workdir is None else epath.Path(self._workdir) / "learners" / str(learner)
        states, about = LearnerStates(folder), about_states(e, self._assembly.layout, self._run)
        state = self._newest(states) if origin is None and self._resumes else None
        if state is not None:
            resumed = from_checkpoint(
                state, about, self._syncer.furthest(learner), self._syncer.core.versions
            )
        if resumed is not None and resumed.values["position"]:
            equipment.batches.set_state(resumed.values["position"])  # the tape says where they begin
        tape = self._tapes.learner(learner, incarnation, equipment, resumed and resumed.begins_with)

        def inner_state(versions: tuple[int, ...]) -> InnerState | None:
            if origin is not None:  # only who needs the snapshot keeps it
                return None if resumed else origin.donated()
            newest = self._newest(states)
            inner = None if newest is None else inner_of(newest)
            undone = inner is not None and any(map(operator.gt, inner.versions, versions))
            return None if undone else inner

        def keep(made: LearnerState) -> None:
            tape.sync()  # else it would name an entry that is nowhere
            states.keep(made)

        every, checkpoints = e.recovery.checkpoint_every, None
        if folder is not None and every:
            checkpoints = Checkpoints(Checkpointing(keep, every, f"{folder}", self._record), about)
        worker = LearnerWorker(
            core,
            equipment,
            send,
            LocalOffers(self._senders, self._syncer),
            self._record,
            inner_state=inner_state,
            tape=tape,
            recording=None if taker is None else LearnerRecording(learner, taker.writer, self._syncer.send),
            checkpoints=checkpoints,
            resumed=resumed,
        )
        link = LocalLink(learner, worker, self._record)
        return worker

    def _newest(self, states: LearnerStates) -> LearnerState | None:
        """The learner's newest state of this run, where there is one; an alarm if none can be read."""
        try:
            return states.newest(self._run)
        except ValueError as error:
            self._record(records.Alarm(f"{error}", time.time()))
            return None

    def _gather(self) -> None:
        """Waits until all learners have resumed: a round without one would overwrite its unmerged work."""
        with waiting("learners to resume"):
            while not all(lr.joining.wait(0.2) or lr.failure is not None for lr in self._learners):
                if self._stop.is_set():
                    return

    def _between_steps(self, call: Callable[[], Any]) -> Any:
        """The result of an evaluation's call for its devices: between a learner's steps, if it uses those."""
        if self._scoring_learner is None or not self._learners:
            return call()
        return self._learners[self._scoring_learner].between_steps(call)

    def _over(self) -> bool:
        all_dead = all(learner.failure is not None for learner in self._learners)
        return self._syncer.ended.is_set() or self._stop.is_set() or all_dead

    def _failure(self) -> str | None:
        """Why the run as a whole failed, if it did; the death of some learners is no failure."""
        if self._syncer.failure is not None:
            return f"the syncer failed: {self._syncer.failure}"
        if all(learner.failure is not None for learner in self._learners):
            return f"every learner failed, the first with {self._learners[0].failure}"
        if self._evaluator.failure is not None:
            return f"an evaluation failed {self._evaluator.failure}"
        return None

    def _committed(self, step: int, fragments: list[Pieces]) -> None:
        if step < self._assembly.experiment.train.steps:  # the last one is scored at the end
            self._evaluator.offer(step, lambda: assemble(self._model.layout, fragments))

    def _tokens_so_far(self) -> int:
        return self._tokens_before + sum(learner.tokens for learner in self._learners)
