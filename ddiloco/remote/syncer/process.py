"""The syncer as a process: a SyncerWorker whose learners come over the wire."""

from __future__ import annotations

import contextlib
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

from ddiloco.disk import run_mark
from ddiloco.disk.durable import DurableState
from ddiloco.disk.snapshots.store import FOLDER, Snapshot
from ddiloco.observe import records
from ddiloco.outer.fragments import assemble
from ddiloco.outer.global_model import GlobalModel
from ddiloco.page.actions import Actions
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.remote.syncer.listening import Listening
from ddiloco.remote.syncer.management import Management
from ddiloco.remote.syncer.positions import Positions
from ddiloco.remote.syncer.resumed import ResumedFrom, begin_from
from ddiloco.remote.syncer.scoring import Scoring
from ddiloco.remote.syncer.server import SyncerServer
from ddiloco.remote.wire.management import Command
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.terms import terms_of
from ddiloco.roles.assembly import Assembly
from ddiloco.roles.outcome import Outcome
from ddiloco.roles.resuming import run_of
from ddiloco.roles.snapshots.taking import SnapshotTaker, snapshot_header
from ddiloco.roles.syncer_worker import SyncerWorker
from ddiloco.roles.taping import Tapes
from ddiloco.settings.experiment import step_tokens

_LEAVE_SECONDS = 60.0  # for learners to say goodbye, and for threads to end


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
        snapshot: Snapshot | None = None,
        actions: Actions | None = None,
    ) -> None:
        """Listens from now on; `run` begins to answer.

        Raises:
          ConfigError: the port is not available, or the disk refuses.
          DataError: the snapshot is of other data.
          DurableStateError: the run cannot continue from what an earlier syncer left.
          SnapshotError: the snapshot has been damaged since it was opened.
        """
        e = assembly.experiment
        positions = Positions(durable.folder)
        durable.sweep()
        if snapshot is not None:
            begin_from(snapshot, assembly, durable, positions)
            durable.complete()
        start = durable.load() if resumed or snapshot is not None else None
        self._assembly = assembly
        self._record = record
        self._stop, self._alone = stop, alone
        if start is None:
            initial = assembly.initial_parameters()
        else:
            initial = assemble(assembly.layout, [fragment.pieces for fragment in start.fragments])
        self._model = GlobalModel(assembly.layout, initial, e.outer, e.most_learners, step_tokens(e))
        if start is None:
            durable.begin(self._model)
            durable.complete()
        else:
            start.restore(self._model)
            record(records.Resumed(start.state.versions, time.time()))
        state = start.state if start is not None else None
        core = SyncerCore(e.sync, e.train.steps, state, durable.lineage)
        workdir = durable.folder.parent
        resumed_from = ResumedFrom.load(durable.folder) if start is not None else None
        snapshot_name = None if resumed_from is None else resumed_from.name
        tapes = Tapes(workdir, e, assembly.layout, record, run=durable.run)
        tape = tapes.syncer(core.state(), self._model, snapshot_name, durable.lineage)
        # Others read what was committed from the disk.
        self._syncer = SyncerWorker(core, self._model, record, lambda step, pieces: None, durable, tape)
        taker = None
        if e.snapshot.every:
            header, send = snapshot_header(e, assembly.layout, durable.run), self._syncer.send
            keep_also = snapshot_name if e.tape.enabled else None
            taker = SnapshotTaker(workdir / FOLDER, e.snapshot, header, core.step, send, record, keep_also)
            self._syncer.take_snapshots(taker)
        if start is not None:
            lost = positions.load()
            if lost is not None:
                record(records.Alarm(lost, time.time()))
        management = Management(
            security,
            e.most_learners,
            lambda: self._syncer.core.step,
            (lambda: False) if taker is None else taker.take_one_soon,
            stop.set,
            lambda line: record(records.Alarm(line, time.time())),
        )
        self._server = SyncerServer(
            terms_of(e, assembly.layout),
            security,
            e.remote,
            self._syncer.connect,
            self._syncer.send,
            self._syncer.take_offer,
            record,
            positions,
            resumed_from,
            durable.run,
            management,
        )
        if actions is not None:
            actions.attach(lambda verb, learner, host: management.do(Command(verb, learner), host))
        self._server.know(core.state().incarnations)
        self._server.start(listening)  # learners compile while this process does
        self._scoring = Scoring(assembly, workdir, durable.run, record)
        if not resumed:  # else learners wait: the first merge compiles for itself
            self._model.compile()

    def run(self) -> Outcome:
        """Merges to the last step, or until `stop` is set; waits while there are no learners."""
        if not self._alone:
            self._serve()
        self._server.stop(_LEAVE_SECONDS)
        self._syncer.stop(_LEAVE_SECONDS)
        params, core = self._model.parameters(), self._syncer.core
        last = self._scoring.last(core.step, self._server.intake.tokens, core.versions, params)
        failure = self._failure(last.problem)
        return Outcome(params, core.step, last.loss, self._alone or core.finished, failure, last.sample)

    def _serve(self) -> None:
        self._server.open()
        self._server.gather(self._assembly.experiment.remote.gather, self._stop)
        self._syncer.start()
        while not (self._syncer.ended.is_set() or self._stop.is_set()):
            self._syncer.ended.wait(0.2)
            self._scoring.take()

    def _failure(self, of_evaluation: str | None) -> str | None:
        if self._syncer.failure is not None:
            return f"the syncer failed: {self._syncer.failure}"
        return None if of_evaluation is None else f"an evaluation failed {of_evaluation}"


def run_syncer(
    assembly: Assembly,
    record: Callable[[Any], None],
    stop: threading.Event,
    snapshot: Snapshot | None,
    *,
    listening: Listening,
    security: Security,
    folder: pathlib.Path,
    alone: bool = False,
    actions: Actions | None = None,
) -> Outcome:
    """Makes and runs a SyncerRun, whose durable state is in `folder`: a run that has begun there goes on.

    With a snapshot the durable state is made from that, and learners resume from their parts of it.
    `alone`: all learners have left after their last step, and only the result is to be saved. `actions`: what
    the run's page asks for.
    """
    earlier = run_mark.begun(folder)
    resumed = earlier is not None
    run = earlier.run if earlier is not None else run_of(snapshot)
    keep = assembly.experiment.remote.keep_versions
    durable = DurableState(folder, assembly.layout, record, stop, run, keep)
    if earlier is not None and not earlier.start:
        with contextlib.suppress(OSError):  # it is gone, and goes on to be told by the fragments
            durable.complete()
    made = SyncerRun(assembly, record, stop, listening, security, durable, resumed, alone, snapshot, actions)
    return made.run()
