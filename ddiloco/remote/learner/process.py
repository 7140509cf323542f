"""A learner as a process: a LearnerWorker connected to a remote syncer."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etils import epath

from ddiloco.config import CORRUPT, ConfigError
from ddiloco.data.errors import DataError
from ddiloco.outer.encoding import FragmentDecoder
from ddiloco.protocol.learner import LearnerCore
from ddiloco.remote.learner.client import ShardBook, SyncerClient, SyncerClients
from ddiloco.remote.learner.donor import Donor
from ddiloco.remote.learner.followers import Followers
from ddiloco.remote.learner.host_arrays import inner_of, needs_of
from ddiloco.remote.learner.hosts import HostPlace, stacks_file
from ddiloco.remote.learner.inner_format import InnerFormat
from ddiloco.remote.learner.leading import Lead
from ddiloco.remote.learner.recovery import ProcessRecovery
from ddiloco.remote.learner.streams import Host, HostWire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.compatibility import terms_of
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.token_bucket import TokenBucket
from ddiloco.remote.wire.validation import WireError
from ddiloco.storage.learner_state import LearnerState, LearnerStates
from ddiloco.telemetry import records
from ddiloco.telemetry.waits import waiting
from ddiloco.telemetry.watches import HangWatch, Watch
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.checkpointing import Checkpointing
from ddiloco.workers.exchange import CheckpointWritten, Leave
from ddiloco.workers.learner_arrays import Equipment, TrainingArrays
from ddiloco.workers.learner_worker import MAX_CORRUPT_STEPS, Checkpoints, LearnerWorker
from ddiloco.workers.resuming import ResumedLearner, about_states, from_checkpoint
from ddiloco.workers.tapes import Tapes

if TYPE_CHECKING:
    from ddiloco.remote.learner.receipts import LearnerReceipts

_RECORDS_SECONDS = 30.0  # for the last records to be confirmed, if the syncer is there
_ABANDONED_SECONDS = 2.0  # for other things then, when the syncer may have ended


@dataclasses.dataclass(frozen=True)
class LearnerOptions:
    """What a learner's process does beside training."""

    folder: epath.Path | None = None  # where it keeps checkpoints of its state; None: nowhere
    workdir: pathlib.Path | None = None  # where its tape goes; None: it keeps none
    stepping: Callable[[], None] = lambda: None  # called after the first step, and the first of each return
    watches: Sequence[Watch] = ()  # they see the records, such as to take a trace of some steps
    comes_back: Callable[[], bool] = lambda: False  # whether, asked to end, it is to begin again at once


_NOTHING_ELSE = LearnerOptions()


class LearnerProcess:
    """This process as a learner; until it has a number it may wait as a spare, with everything compiled."""

    def __init__(self, assembly: Assembly, security: Security, place: HostPlace | None = None) -> None:
        """Its experiment must agree with the syncer's, and `security` with what the syncer requires.

        `place`: which of the learner's hosts this process is, number 0; None: the only one.
        """
        self._assembly, self._security, self._place = assembly, security, place
        self._lead: Lead | None = None  # of the learner's other hosts
        self._experiment = assembly.experiment
        self._equipment: Equipment | None = None
        self.failure_code = 1  # exit code of one that has failed

    @property
    def preempted(self) -> bool:
        """Whether it ended because another of the learner's hosts was asked to end."""
        return self._lead is not None and self._lead.preempted

    def compile(self) -> None:
        """Gets ready without the learner's number; only if all learners draw the same number of rows."""
        self._assembly.check_learner(0)
        self._equipment = self._assembly.own_equipment(0)

    def run(
        self,
        learner: int,
        address: str,
        stop: threading.Event,
        note: Callable[[str], None],
        options: LearnerOptions = _NOTHING_ELSE,
    ) -> str | None:
        """Trains until the run is over or `stop` is set; steps on while the syncer cannot be reached.

        Args:
          learner: its number, from 0; its data shards follow from it.
          address: the syncer's, HOST:PORT.
          stop: ends it early.
          note: takes a line on what happens to the connection.
          options: what else it does.

        Returns:
          Why the learner failed; None if it did not.

        Raises:
          ConfigError, DataError: a setting is impossible, or the first syncer that answers refuses it.
        """
        e, config = self._experiment, self._experiment.remote
        with contextlib.ExitStack() as ending:
            if self._place is not None:
                left = lambda: self._lead is not None and self._lead.left.is_set()  # noqa: E731
                ending.enter_context(self._place.ending(left))
            if learner >= e.max_learners:
                problem = f"is {learner}, but must be below {e.max_learners}, by config.remote.max_learners"
                raise ConfigError(f"learner_id: {problem}")
            # Above the incarnations of all earlier processes of the learner: each took one more at a rejoin,
            # at most once a microsecond.
            process = time.time_ns() // 1000
            terms = terms_of(e, self._assembly.layout)
            security = self._security.of(learner)
            if self._place is not None:  # the others may have their data before this one
                self._lead = Lead(self._place, learner, terms, security, config, stop)
            self._assembly.check_learner(learner)
            others = tuple if self._lead is None else self._lead.followers.donors
            limit = TokenBucket()
            donor = Donor(security, config.keepalive, others=others, limit=limit)
            gives_at = donor.open(config, address)

            def accepted(message: pb.Accepted) -> None:
                donor.admit(security.among_peers(message.peers_token))

            decode = self._assembly.decoder()
            book = ShardBook(address, learner, process, terms.shards)
            receipts = self._receipts(learner, options.workdir, note)

            def make_clients(followers: Followers | None = None, host: Host | None = None) -> SyncerClients:
                own = HostWire(terms, security, config, decode, host, receipts, limit)
                of_all = own, note, gives_at, accepted, followers
                found = [SyncerClient(book, shard, *of_all) for shard in range(book.shards)]
                # A thread that is still in gRPC's code as the interpreter ends would abort the process.
                for client in found:
                    ending.callback(client.finish, 0.0)
                return SyncerClients(found)

            connected = self._connected(make_clients, decode, learner, stop, note)
            if connected is None:
                return None
            clients, equipment = connected
            failure = None
            if clients.refusal is None and not clients.over:
                incarnation = max(process, clients.newest_incarnation + 1)
                core = LearnerCore(learner, incarnation, e.sync, e.train.steps, book.shards)
                failure = self._train(core, equipment, clients, donor, stop, options)
                clients.finish(_ABANDONED_SECONDS if stop.is_set() else _RECORDS_SECONDS)
            if clients.refusal is not None and book.run:  # it fitted before, and so may another process
                failure = f"the syncer refused learner {learner}: {clients.refusal}"
            if self._lead is not None:
                self._lead.leave(failure, self.failure_code)
            if clients.refusal is not None and not book.run:
                raise ConfigError(f"syncer: {address} refused learner {learner}: {clients.refusal}")
            return failure

    def _receipts(
        self, learner: int, workdir: pathlib.Path | None, note: Callable[[str], None]
    ) -> LearnerReceipts | None:
        e = self._experiment
        if not e.remote.receipts:
            return None
        if workdir is None:
            raise ConfigError("workdir: is missing, where remote.receipts has the learner's key")
        from ddiloco.remote.learner.receipts import LearnerReceipts

        return LearnerReceipts(workdir, learner, note)

    def _connected(
        self,
        make_clients: Callable[..., SyncerClients],
        decode: FragmentDecoder | None,
        learner: int,
        stop: threading.Event,
        note: Callable[[str], None],
    ) -> tuple[SyncerClients, Equipment] | None:
        """The clients, accepted or refused by the syncer, with all compiled; None: `stop` was set first."""
        clients: SyncerClients | None
        if self._lead is None:
            clients = make_clients()
            clients.start()  # they connect while this thread compiles
            equipment = self._equipped(learner)
        else:
            equipment = self._equipped(learner)
            clients = self._lead.connect(make_clients, equipment, note)
            if clients is None:
                return None
            clients.start()
        if decode is not None:
            decode.compile()
        with waiting("the syncer"):
            while not clients.answered:
                if stop.wait(0.2):
                    if self._lead is not None:
                        self._lead.leave()
                    return None
        return clients, equipment

    def _equipped(self, learner: int) -> Equipment:
        kind = self._assembly.recipe.kind
        if self._place is not None:
            return self._assembly.own_equipment(learner, self._place.count)
        if self._equipment is None or kind((learner,)) != kind((0,)):
            return self._assembly.own_equipment(learner)
        return self._assembly.reassigned(self._equipment, learner)

    def _train(
        self,
        core: LearnerCore,
        equipment: Equipment,
        clients: SyncerClients,
        donor: Donor,
        stop: threading.Event,
        options: LearnerOptions,
    ) -> str | None:
        client, folder, workdir, watches = clients.first, options.folder, options.workdir, options.watches
        config, record = self._experiment.remote, client.outbox.record
        lead, make_arrays = self._lead, TrainingArrays
        inner = InnerFormat(equipment.program.inner_leaves) if lead is None else inner_of(equipment)

        def steps(does: bool) -> None:
            # Only a learner that steps can donate: those that join together must not wait for each other.
            if does:
                longest = client.throughput.limit(config.donation_timeout, inner.bytes)
                donor.attach(worker.inbox, inner, longest, lambda: worker.boundary_seconds)
                options.stepping()
            else:
                donor.detach()

        make_recovery: Callable[..., ProcessRecovery] = ProcessRecovery
        if lead is not None:
            equipment, make_arrays = lead.equipped(equipment), lead.make_arrays(core)
            make_recovery = lead.recovery
        states = LearnerStates(folder, None if lead is None else needs_of(equipment))
        recovery = make_recovery(client, inner, self._security, config, states, steps)
        about = about_states(self._experiment, self._assembly.layout, client.run, core.learner)
        resumed = self._from_checkpoint(equipment, clients, recovery, inner, about)
        tapes = Tapes(workdir, self._experiment, self._assembly.layout, record, run=client.run)
        tape = tapes.learner(core.learner, core.incarnation, equipment, resumed and resumed.begins_with)

        def keep(state: LearnerState, snapshot: int) -> None:
            tape.sync()  # else it would name an entry that is nowhere
            recovery.keep(state, snapshot)

        def written(snapshot: int, result: LearnerState | str) -> None:
            client.send_checkpoint_written(CheckpointWritten.of(core.learner, snapshot, result))

        every = self._experiment.recovery.checkpoint_every
        kept = None if folder is None else keep
        checkpoints = Checkpoints(Checkpointing(kept, every, f"{folder}", record, written), about)
        timeout = self._experiment.train.hang_timeout or (lead and config.host_timeout)
        if timeout:
            stacks = stacks_file(workdir, core.learner)
            watches = (*watches, HangWatch(timeout, f"learner {core.learner}", stacks))
        watched = record
        for watch in watches:
            watched = watch.watching(watched)
        worker = LearnerWorker(
            core,
            equipment,
            clients.say,
            clients,
            watched,
            recovery.inner_state,
            recovery.stepped,
            tape,
            checkpoints,
            resumed,
            make_arrays,
        )
        clients.attach(worker.inbox)
        with contextlib.ExitStack() as stack:
            stack.callback(donor.stop)
            for watch in watches:
                stack.callback(watch.close)
            worker.start()
            _wait(worker, stop, options.comes_back)
        if worker.corrupt_steps >= MAX_CORRUPT_STEPS:
            self.failure_code = CORRUPT
        return worker.failure

    def _from_checkpoint(
        self,
        equipment: Equipment,
        clients: SyncerClients,
        recovery: ProcessRecovery,
        inner: InnerFormat,
        about: Mapping[str, Any],
    ) -> ResumedLearner | None:
        """The learner's own newest state, if this process resumes it.

        Without a state that can be used whole, it joins as a new learner, with the inner state.
        """
        begun, client = time.monotonic(), clients.first
        state = recovery.newest()
        if state is None or not inner.fits(state.inner):
            return None
        try:
            resumed = from_checkpoint(state, about, clients.furthest, clients.versions)
            if resumed is not None and resumed.values["position"] is not None:
                equipment.batches.set_state(resumed.values["position"])  # the tape records their start
            if resumed is not None and self._lead is not None:
                self._lead.go_on(state.arrays.number)
            if resumed is not None:
                values = {
                    "inner_state": "checkpoint",
                    "donor_step": resumed.begins_with.work.clock,
                    "trained": resumed.trained,
                    "bytes": inner.bytes,
                    "seconds": time.monotonic() - begun,
                }
                client.outbox.record(records.Noted("recovered", values, time.time()))
            return resumed
        except (DataError, WireError, LookupError, TypeError, ValueError) as error:
            problem = f"{records.reason(error)}: the learner joins again"
            client.outbox.record(records.Alarm(problem, time.time()))
            return None


def _wait(worker: LearnerWorker, stop: threading.Event, comes_back: Callable[[], bool]) -> None:
    leaving = False
    while not worker.join(0.2):
        if stop.is_set() and not leaving:
            leaving = True
            worker.inbox.put(Leave(comes_back()))
