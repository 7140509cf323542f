"""The syncer, or one of its shards, as a process: a SyncerWorker with remote learners."""

from __future__ import annotations

import contextlib
import gc
import pathlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddiloco.config import ConfigError
from ddiloco.outer.fragments import assemble
from ddiloco.outer.global_model import GlobalModel
from ddiloco.protocol.schedule import fragments_of
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.remote.syncer.listening import Listening
from ddiloco.remote.syncer.management import Management
from ddiloco.remote.syncer.scoring import LastScore, Scoring
from ddiloco.remote.syncer.server import OverSyncer, SyncerServer
from ddiloco.remote.syncer.shard_records import RecordsLink
from ddiloco.remote.syncer.shards import Shards
from ddiloco.remote.wire.compatibility import terms_of
from ddiloco.remote.wire.security import Security
from ddiloco.storage import run_mark, shard_states
from ddiloco.storage.durable import SHOWN_SECONDS, DurableState
from ddiloco.storage.snapshots import FOLDER, SnapshotStore
from ddiloco.storage.workdir import owned_fragments
from ddiloco.telemetry import records
from ddiloco.telemetry.files import read_json
from ddiloco.telemetry.waits import waiting
from ddiloco.training import memory
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.durable_start import durable_start
from ddiloco.workers.exchange import Pieces
from ddiloco.workers.retiming import Retiming
from ddiloco.workers.run_result import Outcome
from ddiloco.workers.snapshots import SnapshotAsked, SnapshotTaker
from ddiloco.workers.syncer_worker import SyncerWorker
from ddiloco.workers.tapes import Tapes

_LEAVE_SECONDS = 60.0  # for learners to say goodbye, and for threads to end
LEARNER_COPIES = 5  # of the parameters in a checkpoint, at most: with what optimizers and codecs keep
_SUMMARY_SECONDS = 10.0  # for the summary to be written
_RECORDS_SECONDS = 10.0  # for the last records to be sent to the first shard
_OTHERS_SECONDS = 20.0  # for other shards to end after this one has


class SyncerRun:
    """One run of the decoupled family at one shard of its syncer; learners join and leave at any time."""

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
        shard: int = 0,
    ) -> None:
        """Listens from now on; `run` begins to answer. The last three are as in `run_syncer`.

        Raises:
          ConfigError: the port is not available, or the disk refuses.
          DurableStateError: the run cannot continue from what an earlier syncer left.
        """
        e = assembly.experiment
        self._assembly, self._record, self._durable = assembly, record, durable
        self._stop, self._alone, self._comes_back = stop, alone, comes_back
        self._shard, self._own = shard, fragments_of(shard, e.syncer_shards, e.sync.num_fragments)
        self.locks = contextlib.ExitStack()
        workdir = durable.folder.parent
        try:
            self._model, state = self._durable_state(resumed)
        except OSError as error:
            raise ConfigError(f"workdir: {workdir}: cannot be written to: {records.reason(error)}") from None
        mark = run_mark.begun(durable.folder)
        assert mark is not None, "it was completed above"
        self._shards = Shards(durable.folder, mark, shard, e.syncer_shards, e.train.steps)
        core = SyncerCore(e.sync, e.train.steps, state, durable.lineage, shard, e.syncer_shards)
        tapes = Tapes(workdir, e, assembly.layout, record, run=durable.run)
        tape = tapes.syncer(core.state(), self._model, durable.lineage, shard)
        self._syncer = SyncerWorker(core, self._model, record, durable=durable, tape=tape)
        self._takes_snapshots = not shard
        if self._takes_snapshots:
            store = SnapshotStore(workdir / FOLDER, e.snapshot.keep)
            known = e, durable.run, self._pin, core.step, self._syncer.send, record
            self._syncer.take_snapshots(SnapshotTaker(store, *known, self._seconds_for_checkpoints))
        management = Management(
            security,
            e.max_learners,
            lambda: self._syncer.core.step,
            self._take_snapshot,
            self._stopped,
            lambda line: record(records.Alarm(line, time.time())),
            durable.folder,
            shard,
            lambda: self._shards.addresses,
            Retiming(e.sync, self._syncer.send),
        )
        self._management = management
        self._server = SyncerServer(
            terms_of(e, assembly.layout),
            security,
            listening,
            self._syncer,
            record,
            durable.run,
            management,
            shard,
        )
        self._server.know(core.state().incarnations)
        for lost in core.lost_for_good(lambda m: m >= e.max_learners or management.drained(m)):
            self._syncer.send(lost)
        self._server.start()  # learners compile while this process does
        self._announce(listening.address)
        self._scoring = Scoring(assembly, workdir, durable.run, record, stop)
        if not resumed:  # else learners wait: the first merge compiles for itself
            with waiting("the merge to compile"):
                self._model.compile()
        memory.return_freed()
        gc.freeze()  # what was imported and compiled: collections need not look at it again

    def run(self) -> Outcome:
        """Merges to the last step, or until `stop` is set; waits while there are no learners.

        If an earlier syncer has merged the last step, and no learner connects, all have left. Each of several
        shards serves until all have finished; the first returns the result.
        """
        if self._shards.finished:  # before: learners that do not know may still connect
            self._server.away |= set(range(self._assembly.experiment.max_learners))
        alone = self._alone or self._serve()
        # Learners that knew the run to be over would not wait for the next syncer.
        over = self._is_over()
        if over:
            reconnect = 0.0 if self._stop.is_set() else self._assembly.experiment.remote.longest_backoff
            with waiting("learners to leave"):
                last = self._await_others if not self._shard else lambda: None
                self._server.stop(_LEAVE_SECONDS + self._syncer.last_snapshot_seconds(), reconnect, last)
        with waiting("the last merges and snapshot"):
            self._syncer.stop(_LEAVE_SECONDS)
        if not over:  # only now: the syncer would take its learners for lost, and complete a snapshot without
            self._server.close()
        self._shards.close()
        core = self._syncer.core
        finished = self._shards.finished or (alone and self._is_trained())
        if self._shard:
            return Outcome({}, core.step, None, finished, self._failure(None))
        params, state = self._result()
        last_score = LastScore(None, None, None)  # another goes on, and this may not have the time
        if over or finished:
            with waiting("the last evaluation"):
                last_score = self._scoring.last(state.step, state.versions, params)
        failure = self._failure(last_score.problem)
        return Outcome(params, state.step, last_score.loss, finished, failure, last_score.sample)

    @property
    def superseded(self) -> bool:
        """Whether the run was restarted elsewhere, so that this process must end."""
        return self._shards.superseded

    def end(self) -> None:
        """Notifies the other shards that this one ends with the run, if so, after its records are sent."""
        if self._is_over():
            core = self._syncer.core
            with contextlib.suppress(OSError):  # they wait for some seconds
                self._shards.end([core.versions[p] for p in self._own])

    def _is_over(self) -> bool:
        """Whether, to this shard's knowledge, the run ends and not only its process."""
        if self._shard:
            return self._shards.ended.is_set() and not self._shards.superseded
        finished = self._shards.finished or (self._shards.count == 1 and self._syncer.core.finished)
        return finished or not (self._syncer.failure or self._comes_back())

    def _finish(self) -> None:
        """Makes durable that this shard has finished; it serves until all have."""
        try:
            self._shards.finish()
        except OSError as error:
            self._record(records.Alarm(f"{self._durable.folder}: {records.reason(error)}", time.time()))
            if self._shards.count > 1:
                time.sleep(1.0)  # until the disk takes it
                return
            self._shards.ended.set()
        self._shards.look()

    def _stopped(self) -> None:
        """An operator has ended the run."""
        self._shards.ended.set()
        self._stop.set()

    def _announce(self, address: str) -> None:
        try:
            self._shards.announce(address)
        except OSError as error:
            raise ConfigError(f"workdir: {self._durable.folder}: {records.reason(error)}") from None
        self._shards.look()
        if self._shards.count > 1:
            self._server.send_addresses(self._shards.addresses)
            self._shards.watch(self._look)

    def _look(self) -> None:
        """Now and then, at what other shards and operators have written."""
        self._management.look()
        self._server.send_addresses(self._shards.addresses)

    def _await_others(self) -> None:
        """Waits for other shards to end, whose last merges and records belong to the result."""
        if self._shards.count > 1:
            self.end()
            seconds = _LEAVE_SECONDS if self._shards.finished else _OTHERS_SECONDS
            with waiting("the other shards to end"):
                self._shards.wait_for_others(seconds)

    def _is_trained(self) -> bool:
        """Whether a learner has reached the last step; without any, whether all were drained."""
        if self._shard:
            return False
        records.write_out(self._record, _SUMMARY_SECONDS, summary=True)
        step = read_json(self._durable.folder.parent / "summary.json").get("step", 0)
        return max(step, self._syncer.core.step) >= self._assembly.experiment.train.steps

    def _durable_state(self, resumed: bool) -> tuple[GlobalModel, SyncerState | None]:
        """Makes the initial state durable; returns the model of this shard, and the state."""
        durable, every = self._durable, range(self._assembly.layout.num_fragments)
        durable.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as own, contextlib.ExitStack() as others:
            own.enter_context(owned_fragments(durable.folder, self._own))
            if not resumed:  # no other shard may be at work
                rest = [p for p in every if p not in self._own]
                others.enter_context(owned_fragments(durable.folder, rest))
            begins = resumed, self._record, self._own, others.close
            found = durable_start(self._assembly, durable, *begins)
            self.locks.push(own.pop_all())
            return found

    def _seconds_for_checkpoints(self) -> float:
        """For learners to write them, by how fast the syncer's disk is: it may be theirs, too."""
        e = self._assembly.experiment
        size = e.max_learners * LEARNER_COPIES * sum(self._assembly.layout.bytes)
        return self._durable.throughput.timeout(e.snapshot.timeout, size)

    def _pin(self, folder: pathlib.Path, versions: Sequence[int]) -> int:
        """Pins the durable state of all shards: every version that they send is in one folder before."""
        every = range(self._assembly.layout.num_fragments)
        if versions:
            self._durable.await_shown([p for p in every if p not in self._own], versions)
        return self._durable.pin(every, folder, versions)

    def _take_snapshot(self) -> bool:
        """Requests a snapshot; False: another shard takes them."""
        if self._takes_snapshots:
            self._syncer.send(SnapshotAsked())
        return self._takes_snapshots

    def _result(self) -> tuple[dict[str, np.ndarray], SyncerState]:
        """The parameters, and of which versions they are; those of other shards are on the disk."""
        core = self._syncer.core
        if self._shards.count == 1:
            return self._model.parameters(), core.state()
        layout, ended = self._assembly.layout, self._shards.wait_for_others(0.0)
        least = list(core.versions)
        for shard, state in ended.items():
            own = fragments_of(shard, self._shards.count, len(least))
            for p, version in zip(own, state.versions, strict=False):
                least[p] = version
        until = time.monotonic() + SHOWN_SECONDS
        pieces = [self._last(p, version, until) for p, version in enumerate(least)]
        return assemble(layout, pieces), self._durable.state()

    def _last(self, p: int, version: int, until: float) -> Pieces:
        """A fragment as its shard left it; a shared disk may show that late."""
        while (state := self._durable.fragment(p)[0]).version < version:
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
        deadline = time.monotonic() + e.remote.gather + e.remote.longest_backoff
        while not (self._shards.ended.is_set() or self._stop.is_set() or self._syncer.failure):
            (self._shards.ended if self._shards.has_finished else self._syncer.ended).wait(0.2)
            if not self._shard:
                self._scoring.take()
            if self._syncer.core.finished and not self._shards.has_finished:
                self._finish()
            if merged and not self._server.connected and time.monotonic() > deadline:
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
    """Makes and runs a SyncerRun with durable state in `folder`; a run in there is continued.

    Of several shards it is the first, which starts the run and returns its result. `alone`: all learners have
    left after their last step, and only the result is to be saved. `comes_back`: whether another syncer will
    continue the run if `stop` is set.
    """
    earlier = run_mark.begun(folder)
    resumed = earlier is not None
    run = earlier.run if earlier is not None else secrets.token_hex(16)
    keep = assembly.experiment.recovery.keep_versions
    durable = DurableState(folder, assembly.layout, record, stop, run, keep)
    if earlier is not None and not earlier.start:
        with contextlib.suppress(OSError):  # removed; the fragments still identify the run
            durable.complete()
    made = SyncerRun(assembly, record, stop, listening, security, durable, resumed, alone, comes_back)
    with made.locks:
        return made.run()


def run_shard(
    assembly: Assembly,
    stop: threading.Event,
    shard: int,
    *,
    listening: Listening,
    security: Security,
    folder: pathlib.Path,
) -> str | None:
    """Runs a further shard, once the first has started the run in `folder`; returns the error, if any.

    It ends with the run, or when `stop` is set: then another process continues.

    Raises:
      ConfigError: the port or the fragments are another process's.
      DurableStateError, RunMarkError: the folder's content cannot be used.
    """
    e = assembly.experiment
    listening.claim()
    with waiting("the first shard of the syncer to begin the run"):
        while (mark := run_mark.begun(folder)) is None:
            if stop.wait(0.2):
                return None
    terms = terms_of(e, assembly.layout)

    def first() -> str:
        state = shard_states.load(folder, 0)
        return "" if state is None else state.address

    link = RecordsLink(first, shard, terms, security, e.remote, mark.run)
    durable = DurableState(
        folder, assembly.layout, link.record, stop, mark.run, e.recovery.keep_versions, shard
    )
    made = SyncerRun(assembly, link.record, stop, listening, security, durable, resumed=True, shard=shard)
    link.start()
    with made.locks:
        outcome = made.run()
        link.finish(_RECORDS_SECONDS)
        made.end()
    if made.superseded:
        return "the run was started again"
    return outcome.failure


def announce_end(
    assembly: Assembly, *, listening: Listening, security: Security, folder: pathlib.Path
) -> None:
    """Sends the end of the run in `folder` to learners that were disconnected at that time.

    Returns once all have left, or each has had the time to connect. May raise RunMarkError, or ConfigError:
    the port is in use.
    """
    e, mark = assembly.experiment, run_mark.begun(folder)
    if mark is None:  # removed since: learners of another run could not be recognised
        return

    of_run = terms_of(e, assembly.layout), security, listening
    server = SyncerServer(*of_run, OverSyncer(), lambda record: None, mark.run)
    server.away |= set(range(e.max_learners))
    server.start()
    server.stop(_LEAVE_SECONDS, reconnect_timeout=e.remote.longest_backoff)
