"""The local driver: all roles in one process, a thread for each learner and one for the syncer."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import operator
import pathlib
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from etils import epath

from ddiloco.config import ConfigError
from ddiloco.goodput.accounting import State
from ddiloco.outer.fragments import assemble
from ddiloco.protocol import events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.storage import operator_orders, run_mark
from ddiloco.storage.durable import FOLDER as DURABLE
from ddiloco.storage.durable import DurableState
from ddiloco.storage.learner_state import LearnerState, LearnerStates
from ddiloco.storage.snapshots import FOLDER, SnapshotStore
from ddiloco.telemetry import records
from ddiloco.telemetry.files import read_json
from ddiloco.telemetry.trimming import SUMMARY
from ddiloco.telemetry.waits import waiting
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.checkpointing import Checkpointing
from ddiloco.workers.durable_start import durable_start
from ddiloco.workers.evaluator import Evaluations, Evaluator, unless
from ddiloco.workers.exchange import CheckpointWritten, Delivery, EventDelivery, InnerState, Leave, Pieces
from ddiloco.workers.learner_arrays import Equipment
from ddiloco.workers.learner_worker import Checkpoints, LearnerWorker
from ddiloco.workers.resuming import about_states, from_checkpoint, inner_of
from ddiloco.workers.retiming import Retiming
from ddiloco.workers.run_result import Outcome
from ddiloco.workers.snapshots import SnapshotTaker
from ddiloco.workers.syncer_worker import SyncerWorker
from ddiloco.workers.tapes import Tapes
from ddiloco.workers.transfer import Offer

_LEAVE_SECONDS = 60.0  # for threads to end after Leave; a hung device must not hold up the others


class LocalLink:
    """Reaches a learner in the same process."""

    def __init__(self, learner: int, worker: LearnerWorker, record: Callable[[Any], None]) -> None:
        self._learner, self._worker, self._record = learner, worker, record

    def deliver(self, delivery: Delivery) -> None:
        """Puts it into the learner's inbox; records the bytes that a network would carry."""
        self._worker.inbox.put(delivery)
        if isinstance(delivery, EventDelivery) and delivery.fragments:
            moved = [delivery.difference] if delivery.difference else delivery.fragments
            size = sum(array.nbytes for arrays in moved for array in arrays)
            self._record(records.Transferred(self._learner, sent=0, received=size))

    def begun(self, incarnation: int) -> None:
        """Does nothing: threads of one process do not send each other inner states."""


class LocalOffers:
    """Passes a learner's offers to the syncer in the same process, once they are in host memory."""

    def __init__(self, senders: concurrent.futures.Executor, syncer: SyncerWorker) -> None:
        self._senders, self._syncer = senders, syncer
        self._lock = threading.Lock()
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """Number of queued offers."""
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
        comes_back: Callable[[], bool] = lambda: False,
    ) -> None:
        """`workdir`: for merged fragments, tapes and snapshots; None: nothing is stored.

        A run in the workdir is continued. `comes_back`: whether another process will continue this one, once
        `stop` is set: then its last parameters are not scored.

        Raises:
          ConfigError: the workdir cannot be written.
          DurableStateError, RunMarkError: the run in the workdir cannot be resumed.
        """
        e = assembly.experiment
        self._assembly, self._record, self._stop, self._workdir = assembly, record, stop, workdir
        self._comes_back = comes_back
        compiler = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="compile")
        equipment = compiler.submit(assembly.equipment)  # beside the syncer's part
        compiler.shutdown(wait=False)
        earlier = None if workdir is None else run_mark.begun(workdir / DURABLE)
        self._resumes = earlier is not None
        self._run = secrets.token_hex(16) if earlier is None else earlier.run
        self._tapes = Tapes(workdir, e, assembly.layout, record, run=self._run)
        durable, state = None, None
        if workdir is None:
            self._model = assembly.global_model(assembly.initial_parameters())
        else:
            kept = e.recovery.keep_versions
            durable = DurableState(workdir / DURABLE, assembly.layout, record, stop, self._run, kept)
            self._model, state = durable_start(assembly, durable, earlier is not None, record)
        lineage = 0 if durable is None else durable.lineage
        core = SyncerCore(e.sync, e.train.steps, state, lineage)
        self._learners: list[LearnerWorker] = []
        self._tokens_before = 0  # trained by earlier processes; this one's learners do not count them
        score = assembly.scorer(assembly.learner_meshes()[0])
        self._last_evaluation = Evaluations(score, 0, record)
        self._scoring_learner = assembly.evaluation_learner()
        score = assembly.scorer(assembly.evaluation_mesh(), self._between_steps)
        self._evaluator = Evaluator(score, e.eval.every, self._tokens_so_far, self._record, core.step)
        tape = self._tapes.syncer(core.state(), self._model, lineage)
        self._syncer = SyncerWorker(core, self._model, self._record, self._committed, durable, tape)
        if durable is not None:
            self._take_snapshots(durable, core.step)
        with waiting("learners to compile"):  # merges and evaluations compile when first used
            compiled = equipment.result()
        self._senders = concurrent.futures.ThreadPoolExecutor(len(compiled), thread_name_prefix="offers")
        self._learners = [self._add_learner(m, parts) for m, parts in enumerate(compiled)]
        for event in core.lost_for_good(lambda learner: learner >= len(self._learners)):  # of a larger M
            self._syncer.send(event)
        self._retiming = Retiming(e.sync, self._syncer.send)
        self._follow_orders()
        if self._resumes:
            before = read_json(workdir / SUMMARY).get("tokens", {})
            self._tokens_before = sum(before.values())

    def run(self) -> Outcome:
        """Trains to the last step, or until all learners are dead or `stop` is set."""
        # Compiled beside the first steps, as merges are, so that the first step comes sooner.
        self._evaluator.start(None if self._resumes else self._model.parameters())
        for learner in self._learners:
            learner.start()
        try:
            if self._resumes:
                self._gather()
            self._syncer.start()
            while not self._over():
                self._syncer.ended.wait(0.2)
                with contextlib.suppress(run_mark.RunMarkError, ConfigError):  # the file is read again
                    self._follow_orders()
        finally:  # also after an interrupt of a caller that lives on, such as a notebook's cell
            self._end()
        params, step, loss = self._model.parameters(), self._syncer.core.step, None
        finished = self._syncer.core.finished
        if not self._evaluator.broken and (finished or not self._comes_back()):
            with waiting("the last evaluation"):
                loss = self._last_evaluation.evaluate(step, self._tokens_so_far(), params)
        return Outcome(params, step, loss, finished, failure=self._failure())

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

    def _follow_orders(self) -> None:
        """Follows the timing that was ordered last."""
        if self._workdir is not None:
            self._retiming.follow(operator_orders.load(self._workdir / DURABLE))

    def _take_snapshots(self, durable: DurableState, step: int) -> None:
        e = self._assembly.experiment
        store = SnapshotStore(durable.folder.parent / FOLDER, e.snapshot.keep)
        pin = functools.partial(durable.pin, range(e.sync.num_fragments))
        send = lambda message: self._syncer.send(message)  # noqa: E731
        self._syncer.take_snapshots(SnapshotTaker(store, e, self._run, pin, step, send, self._record))

    def _add_learner(self, learner: int, equipment: Equipment) -> LearnerWorker:
        e = self._assembly.experiment
        incarnation = 1
        if self._resumes:  # larger than any before: one killed at its start is on no disk, but has a tape
            known = dict(self._syncer.core.state().incarnations)
            incarnation = max(1 + known.get(learner, 0), time.time_ns() // 1000)
        core = LearnerCore(learner, incarnation, e.sync, e.train.steps)

        def send(event: events.SyncerEvent, shard: int) -> None:
            del shard  # there is one
            if isinstance(event, events.LearnerJoined):  # for the first time, or again with a new incarnation
                self._syncer.connect(learner, event.incarnation, link)
            self._syncer.send(event)

        folder = None if self._workdir is None else epath.Path(self._workdir) / "learners" / str(learner)
        states, about = LearnerStates(folder), about_states(e, self._assembly.layout, self._run, learner)
        state, resumed = self._newest(states) if self._resumes else None, None
        if state is not None:
            merged = [self._syncer.furthest(learner)]
            resumed = from_checkpoint(state, about, merged, self._syncer.core.versions)
        if resumed is not None and resumed.values["position"]:
            equipment.batches.set_state(resumed.values["position"])  # the tape records their start
        tape = self._tapes.learner(learner, incarnation, equipment, resumed and resumed.begins_with)

        def inner_state(versions: tuple[int, ...]) -> InnerState | None:
            newest = self._newest(states)
            inner = None if newest is None else inner_of(newest)
            undone = inner is not None and any(map(operator.gt, inner.versions, versions))
            return None if undone else inner

        def keep(made: LearnerState, snapshot: int) -> None:
            tape.sync()  # else the checkpoint could name a tape entry that is not on disk
            (states.of_snapshot(snapshot) if snapshot else states).keep(made)

        def written(snapshot: int, result: LearnerState | str) -> None:
            self._syncer.send(CheckpointWritten.of(learner, snapshot, result))

        every = e.recovery.checkpoint_every
        kept = None if folder is None else keep
        checkpoints = Checkpoints(Checkpointing(kept, every, f"{folder}", self._record, written), about)
        worker = LearnerWorker(
            core,
            equipment,
            send,
            LocalOffers(self._senders, self._syncer),
            self._record,
            inner_state=inner_state,
            tape=tape,
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
        """Makes an evaluation's call: between a learner's steps if it uses that learner's devices.

        Raises Abandoned once the run is to stop: what it ends with is scored anew.
        """
        if self._scoring_learner is None or not self._learners:
            return unless(self._stop, call)
        return unless(self._stop, lambda: self._learners[self._scoring_learner].between_steps(call))

    def _over(self) -> bool:
        all_dead = all(learner.failure is not None for learner in self._learners)
        over = self._syncer.ended.is_set() or self._stop.is_set()
        return over or all_dead or self._evaluator.broken

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
