"""The syncer as a process: a SyncerWorker whose learners come over the wire."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ddiloco.config import ConfigError
from ddiloco.goodput.waits import waiting
from ddiloco.outer.fragments import assemble
from ddiloco.outer.global_model import GlobalModel
from ddiloco.protocol.messages import NOTHING_MERGED
from ddiloco.protocol.parts import AuthorityCore
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.remote.syncer.listening import Listening
from ddiloco.remote.syncer.management import Management
from ddiloco.remote.syncer.part_links import PartLinks
from ddiloco.remote.syncer.scoring import LastScore, Scoring
from ddiloco.remote.syncer.server import SyncerServer
from ddiloco.remote.wire.compatibility import terms_of
from ddiloco.remote.wire.security import Security
from ddiloco.storage import run_mark
from ddiloco.storage.durable import DurableState
from ddiloco.storage.ownership import owned_fragments
from ddiloco.storage.snapshots import FOLDER, SnapshotStore
from ddiloco.telemetry import records
from ddiloco.telemetry.files import read_json
from ddiloco.training import memory
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.durable_start import durable_start
from ddiloco.workers.exchange import Pieces
from ddiloco.workers.positions import dealt_or_told
from ddiloco.workers.run_result import Outcome
from ddiloco.workers.snapshots import SnapshotAsked, SnapshotTaker
from ddiloco.workers.syncer_worker import SyncerWorker
from ddiloco.workers.tapes import Tapes

_LEAVE_SECONDS = 60.0  # for learners to say goodbye, and for threads to end
LEARNER_COPIES = 5  # of the parameters in a checkpoint, at most: with what optimizers and codecs keep
_MOST_WAITING = 20_000  # messages that the syncer's thread has yet to take, as when the disk hangs
_SUMMARY_SECONDS = 10.0  # for the summary to be written
_SHOWN_SECONDS = 90.0  # for a shared disk to show what others wrote; NFS may show what was there a minute ago


class SyncerRun:
    """One run of the decoupled family, seen from its syncer; learners may come and go at any time."""

    def __init__(
        self,
        assembly: Assembly,
        record: Callable[[Any], None],
        stop: threading.Event,
        listening: Listening,
        security: Security,
        durable: DurableState,
        resumed: bool,
        alone: bool = False,
        comes_back: Callable[[], bool] = lambda: False,
    ) -> None:
        """Listens from now on; `run` begins to answer. The last two are as in `run_syncer`.

        Raises:
          ConfigError: the port is not available, or the disk refuses.
          DurableStateError: the run cannot continue from what an earlier syncer left.
        """
        e = assembly.experiment
        self._assembly, self._record, self._durable = assembly, record, durable
        self._stop, self._alone, self._comes_back = stop, alone, comes_back
        self.locks = contextlib.ExitStack()
        workdir = durable.folder.parent
        try:
            state = self._durable_state(resumed)
        except OSError as error:
            raise ConfigError(f"workdir: {workdir}: cannot be written to: {records.reason(error)}") from None
        links: PartLinks | None = None
        core: SyncerCore | AuthorityCore
        # Others read what was committed from the disk.
        if self._model is not None:
            core = SyncerCore(e.sync, e.train.steps, state, durable.lineage)
        else:
            core = AuthorityCore(e.sync, e.train.steps, state, e.remote.parts)
        tapes = Tapes(workdir, e, assembly.layout, record, run=durable.run)
        tape = tapes.syncer(core.state(), self._model, durable.lineage)
        passed = lambda one: links.pass_on(one)  # noqa: E731
        self._syncer = SyncerWorker(core, self._model, record, durable=durable, tape=tape, pass_on=passed)
        parts = 0 if self._model is not None else e.remote.parts
        self._takes_snapshots = not parts
        if not parts:
            store = SnapshotStore(workdir / FOLDER, e.snapshot.keep)
            pin = functools.partial(durable.pin, range(e.sync.num_fragments))
            known = e, durable.run, pin, core.step, self._syncer.send, record
            self._syncer.take_snapshots(SnapshotTaker(store, *known, self._seconds_for_checkpoints))
        if parts:
            mark = run_mark.begun(durable.folder)
            assert mark is not None, "it was completed above"
            terms = terms_of(e, assembly.layout)
            links = PartLinks(parts, terms, security, mark, self._syncer.send, record)
        management = Management(
            security,
            e.most_learners,
            lambda: self._syncer.core.step,
            self._take_snapshot,
            stop.set,
            lambda line: record(records.Alarm(line, time.time())),
            durable.folder,
        )
        self._server = SyncerServer(
            terms_of(e, assembly.layout),
            security,
            listening,
            self._syncer.connect,
            self._syncer.send,
            self._syncer.take_offer,
            record,
            durable.run,
            management,
            links,
            lambda learner: (e.train.steps_in_flight + 1) * self._syncer.core.longest_step([learner]),
            lambda: self._syncer.waiting > _MOST_WAITING,
            (lambda learner: NOTHING_MERGED) if parts else self._syncer.furthest,
            lambda: self._syncer.core.versions,
        )
        self._server.know(core.state().incarnations)
        for lost in core.lost_for_good(lambda m: m >= e.most_learners or management.drained(m)):
            self._syncer.send(lost)
        self._server.start()  # learners compile while this process does
        self._scoring = Scoring(assembly, workdir, durable.run, record, stop)
        if not resumed and self._model is not None:  # else learners wait: the first merge compiles for itself
            with waiting("the merge to compile"):
                self._model.compile()
        memory.return_freed()

    def run(self) -> Outcome:
        """Merges to the last step, or until `stop` is set; waits while there are no learners.

        If an earlier syncer has merged the last step, and no learner comes back to this one, all have left.
        """
        alone = self._alone or self._serve()
        # Learners that were told that the run is over would not be there for the next syncer.
        over = self._syncer.core.finished or not (self._syncer.failure or self._comes_back())
        if over:
            patience = 0.0 if self._stop.is_set() else self._assembly.experiment.remote.longest_backoff
            with waiting("learners to leave"):
                self._server.stop(_LEAVE_SECONDS + self._syncer.last_snapshot_seconds(), patience)
        with waiting("the last merges and snapshot"):
            self._syncer.stop(_LEAVE_SECONDS)
        if not over:  # only now: the syncer would take its learners for lost, and complete a snapshot without
            self._server.close()
        params, core = self._parameters(), self._syncer.core
        finished = core.finished or (alone and self._is_trained())
        last = LastScore(None, None, None)  # another goes on, and this may not have the time
        if over or finished:
            with waiting("the last evaluation"):
                last = self._scoring.last(core.step, core.versions, params)
        failure = self._failure(last.problem)
        return Outcome(params, core.step, last.loss, finished, failure, last.sample)

    def _is_trained(self) -> bool:
        """Whether a learner has come to the last step; all may also have left because they were drained."""
        records.write_out(self._record, _SUMMARY_SECONDS, summary=True)
        step = read_json(self._durable.folder.parent / "summary.json").get("step", 0)
        return max(step, self._syncer.core.step) >= self._assembly.experiment.train.steps

    def _durable_state(self, resumed: bool) -> SyncerState | None:
        """Makes durable what the run begins with, and the model unless others merge; what is known."""
        assembly, durable, e = self._assembly, self._durable, self._assembly.experiment
        layout, parts = assembly.layout, e.remote.parts
        self._model: GlobalModel | None = None
        with contextlib.ExitStack() as stack:
            if parts == 1 or not resumed:  # else parts of it may be at work
                durable.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(owned_fragments(durable.folder, range(layout.num_fragments)))
            if parts == 1:
                self._model, state = durable_start(assembly, durable, resumed, self._record)
                self.locks.push(stack.pop_all())
                return state
            if not resumed:
                durable.sweep(range(layout.num_fragments))
            durable.sweep()
            if not resumed:
                initial = assembly.initial_parameters()
                for p in range(layout.num_fragments):  # others merge: one at a time
                    durable.begin(assembly.global_model(initial, [p]))
                durable.complete()
        state = dealt_or_told(durable.state(), e, self._record)
        if resumed:
            self._record(records.Resumed(state.versions, time.time()))
        return state

    def _seconds_for_checkpoints(self) -> float:
        """For learners to write them, by how fast the syncer's disk is: it may be theirs, too."""
        e = self._assembly.experiment
        size = e.most_learners * LEARNER_COPIES * sum(self._assembly.layout.bytes)
        return self._durable.pace.patience(e.snapshot.timeout, size)

    def _take_snapshot(self) -> bool:
        """Has a snapshot taken soon; False: none is ever."""
        if self._takes_snapshots:
            self._syncer.send(SnapshotAsked())
        return self._takes_snapshots

    def _parameters(self) -> dict[str, np.ndarray]:
        if self._model is not None:
            return self._model.parameters()
        layout = self._assembly.layout
        until = time.monotonic() + (_SHOWN_SECONDS if self._syncer.core.finished else 0.0)
        return assemble(layout, [self._last(p, until) for p in range(layout.num_fragments)])

    def _last(self, p: int, until: float) -> Pieces:
        """The last version of a fragment, which a part has committed; a shared disk may show it late."""
        while (state := self._durable.fragment(p)[0]).version < self._syncer.core.versions[p]:
            if time.monotonic() >= until:
                told = f"the model has version {state.version} of fragment {p}: the disk shows no later one"
                self._record(records.Alarm(told, time.time()))
                break
            with waiting(f"the disk to show the last version of fragment {p}"):
                time.sleep(1.0)
        return state.pieces

    def _serve(self) -> bool:
        """Serves learners until the run is over or `stop` is set; whether all had left before."""
        e = self._assembly.experiment
        merged = self._syncer.core.step >= e.train.steps
        self._server.open()
        with waiting("learners to join"):
            self._server.gather(e.remote.gather, self._stop)
        self._syncer.start()
        patience = time.monotonic() + e.remote.gather + e.remote.longest_backoff
        while not (self._syncer.ended.is_set() or self._stop.is_set()):
            self._syncer.ended.wait(0.2)
            self._scoring.take()
            if merged and not self._server.connected and time.monotonic() > patience:
                return True
        return False

    def _failure(self, of_evaluation: str | None) -> str | None:
        if self._syncer.failure is not None:
            return f"the syncer failed: {self._syncer.failure}"
        return None if of_evaluation is None else f"an evaluation failed {of_evaluation}"


def run_syncer(
    assembly: Assembly,
    record: Callable[[Any], None],
    stop: threading.Event,
    *,
    listening: Listening,
    security: Security,
    folder: pathlib.Path,
    alone: bool = False,
    comes_back: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Makes and runs a SyncerRun, whose durable state is in `folder`: a run that has begun there goes on.

    `alone`: all learners have left after their last step, and only the result is to be saved.
    `comes_back`: whether the run goes on with another syncer though `stop` is set.
    """
    earlier = run_mark.begun(folder)
    resumed = earlier is not None
    run = earlier.run if earlier is not None else secrets.token_hex(16)
    keep = assembly.experiment.recovery.keep_versions
    durable = DurableState(folder, assembly.layout, record, stop, run, keep)
    if earlier is not None and not earlier.start:
        with contextlib.suppress(OSError):  # it is gone, and goes on to be told by the fragments
            durable.complete()
    made = SyncerRun(assembly, record, stop, listening, security, durable, resumed, alone, comes_back)
    with made.locks:
        return made.run()


def tell_of_the_end(
    assembly: Assembly, *, listening: Listening, security: Security, folder: pathlib.Path
) -> None:
    """Tells learners that come that the run in `folder` is over: some were away when the others heard of it.

    Returns once all have left, or each has had the time to try. May raise RunMarkError, or ConfigError: the
    port is taken.
    """
    e, mark = assembly.experiment, run_mark.begun(folder)
    if mark is None:  # it was removed since: learners could not be told from those of another run
        return

    terms, ignore = terms_of(e, assembly.layout), lambda *told: None
    parts = None
    if e.has_parts:
        parts = PartLinks(e.remote.parts, terms, security, mark, ignore, ignore)
        parts.leave(0.0)  # whoever comes
    server = SyncerServer(
        terms, security, listening, ignore, ignore, ignore, ignore, run=mark.run, parts=parts
    )
    server.away |= set(range(e.most_learners))
    server.start()
    server.stop(_LEAVE_SECONDS, patience=e.remote.longest_backoff)
