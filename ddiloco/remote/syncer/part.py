"""A part of the syncer as a process: merges some of the fragments, and exchanges them with learners."""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Iterator

import grpc

from ddiloco.config import ConfigError
from ddiloco.outer.fragments import zeros
from ddiloco.protocol.parts import Part
from ddiloco.protocol.schedule import fragments_of
from ddiloco.remote.syncer.downlink import Downlink, NewestFragments
from ddiloco.remote.syncer.fragment_calls import FragmentCalls
from ddiloco.remote.syncer.listening import Listening
from ddiloco.remote.syncer.session import Session
from ddiloco.remote.syncer.uplink import PartPlace, Uplink
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.compatibility import Terms, terms_of
from ddiloco.remote.wire.security import Security
from ddiloco.schema import codec
from ddiloco.settings.remote import HANDSHAKE
from ddiloco.storage import run_mark
from ddiloco.storage.durable import DurableState, DurableStateError
from ddiloco.storage.ownership import owned_fragments
from ddiloco.telemetry import records
from ddiloco.training import memory
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.links import WHICHEVER
from ddiloco.workers.positions import dealt_or_told
from ddiloco.workers.syncer_worker import SyncerWorker
from ddiloco.workers.tapes import Tapes

_LEAVE_SECONDS = 60.0  # for threads to end
_RECORDS_SECONDS = 10.0  # for the last records to be confirmed
EARLY = 16  # calls of each host of a learner that may be ahead of the authority's word, a third of all


class PartServer:
    """Answers learners, in the sessions that the authority has opened for them."""

    def __init__(
        self,
        terms: Terms,
        security: Security,
        listening: Listening,
        worker: SyncerWorker,
        uplink: Uplink,
        patience: float,
    ) -> None:
        """`patience`: seconds that a learner may be ahead of the authority's word of it."""
        self._terms, self._security, self._worker, self._uplink = terms, security, worker, uplink
        self._listening = listening
        self._patience = patience
        self._early = 0  # calls that wait for such a word
        hosts = sum(map(terms.room, range(terms.most_learners)))
        self._most_early = EARLY * (hosts + 4)
        self._change = threading.Condition()
        self._sessions: dict[str, Session] = {}
        self._unnamed: set[str] = set()  # those that a new connection to the authority has yet to name
        self._attached: set[str] = set()  # sessions to which a learner has come
        self._newest = NewestFragments()
        self._calls = FragmentCalls(terms, self._find, worker.send, worker.take_offer, uplink.record)

    def start(self) -> None:
        """Answers from now on."""
        control = grpc.stream_stream_rpc_method_handler(self._control)
        self._listening.begin({"Control": control, **self._calls.handlers})

    def open(self, opened: pb.ToPart.Session) -> None:
        """A learner may come in this session; what is for it waits there until it does."""
        name, learner = opened.name, opened.learner
        with self._change:
            self._unnamed.discard(name)
            if name in self._sessions:
                return

        def moved(size: int) -> None:
            self._uplink.record(records.Transferred(learner, sent=0, received=size))

        down = Downlink(self._newest, moved, opened.hosts, opened.learner)
        session = Session(name, learner, opened.process, down, room=self._terms.room(learner))
        with self._change:
            self._sessions[name] = session
            self._change.notify_all()
        self._worker.connect(learner, WHICHEVER, session)

    def roll_begins(self) -> None:
        """The authority is connected again: it names all sessions that there are."""
        with self._change:
            self._unnamed = set(self._sessions)

    def roll_ends(self) -> None:
        """It has named them; what is on its way in one of those goes on as if nothing had been."""
        self.close(*self._unnamed)

    def close(self, *names: str) -> None:
        """In these sessions learners may not come any longer."""
        with self._change:
            self._unnamed.difference_update(names)
            ended = [session for n in names if (session := self._sessions.pop(n, None)) is not None]
            self._attached.difference_update(names)
        for session in ended:
            session.close("connection lost")

    def _find(self, name: str) -> Session | None:
        """The session of this name; waits for one of which the authority has yet to tell.

        Beyond a number of calls it does not: who names sessions that there are not would take all threads.
        """
        with self._change:
            if name not in self._sessions and self._early < self._most_early:
                self._early += 1
                self._change.wait_for(lambda: name in self._sessions, self._patience)
                self._early -= 1
            return self._sessions.get(name)

    def _control(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """What the part asks of a learner; once a session: what was on its way is lost with the call."""
        del requests
        session = self._calls.session(context)
        if self._security.caller(context).learner not in (None, session.learner):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "these are another learner's credentials")
        with self._change:
            again = session.name in self._attached
            self._attached.add(session.name)
        if again:
            context.abort(wire.CONNECT_ANEW, "messages were lost: connect again to the authority too")
        session.control = context
        if not context.add_callback(lambda: session.close("connection lost")):
            return
        yield from session.messages()


class PartRun:
    """One process that is a part of the syncer of a run."""

    def __init__(
        self,
        assembly: Assembly,
        stop: threading.Event,
        *,
        listening: Listening,
        security: Security,
        authority: str,
        part: int,
        folder: pathlib.Path,
    ) -> None:
        """Listens where `listening` does, to nobody yet.

        `authority`: HOST:PORT. `folder`: of the durable state, the same as the authority's.

        Raises:
          ConfigError: the address is not available.
        """
        e = assembly.experiment
        listening.claim()
        place = PartPlace(part, e.remote.parts, listening.address)
        self._assembly, self._stop, self._listening, self._security = assembly, stop, listening, security
        self._place, self._folder = place, folder
        self._terms = terms_of(e, assembly.layout)
        self._own = fragments_of(place.part, place.parts, assembly.layout.num_fragments)
        empty = zeros(assembly.layout)  # what was committed takes their place
        self._model = assembly.global_model(empty, self._own)
        self._locks = contextlib.ExitStack()
        self._uplink = Uplink(authority, place, self._terms, security, e.remote, self._take)
        self._worker: SyncerWorker | None = None
        self._server: PartServer | None = None
        self._over = threading.Event()  # the authority has said so
        self._problem: str | None = None

    def run(self) -> str | None:
        """Merges until the authority has it leave or `stop` is set; why it failed, None if it did not.

        Raises:
          ConfigError: the authority refuses it, or other processes have its fragments.
        """
        with self._locks:
            self._uplink.start()
            self._model.compile()
            while not (self._stop.wait(0.1) or self._over.is_set() or self._ended()):
                pass
            if self._worker is not None:
                self._worker.stop(_LEAVE_SECONDS)
            self._uplink.finish(_RECORDS_SECONDS)
            self._listening.stop(grace=1.0)
        return self._failure()

    def _ended(self) -> bool:
        failed = self._worker is not None and self._worker.ended.is_set()
        return failed or self._uplink.over.is_set() or self._problem is not None

    def _failure(self) -> str | None:
        if self._worker is not None and self._worker.failure is not None:
            return f"it failed: {self._worker.failure}"
        if self._uplink.refusal is not None:
            return f"it is not connected any more: {self._uplink.refusal}"
        return "the run was started again" if self._uplink.outdated else self._problem

    # Called by the uplink's thread.

    def _take(self, message: pb.ToPart) -> None:
        kind, worker, server = message.WhichOneof("kind"), self._worker, self._server
        if kind == "begin":
            self._begin(message.begin)
        elif kind == "leave":
            self._over.set()
        if worker is None or server is None:
            return
        match kind:
            case "news":
                worker.send(codec.told_by(message.news))
            case "session" if message.session.over:
                server.close(message.session.name)
            case "session":
                server.open(message.session)
            case "roll_ends":  # the first word of a roll call
                server.roll_ends()
            case "offer_failed":
                worker.send(codec.told_by(message.offer_failed))

    def _begin(self, begin: pb.ToPart.Begin) -> None:
        mark = run_mark.RunMark(begin.run, begin.start)
        if self._server is not None:
            self._server.roll_begins()
            return
        try:
            self._load(mark)
        except (DurableStateError, run_mark.RunMarkError, ConfigError, OSError, ValueError) as error:
            self._problem = str(error)

    def _load(self, mark: run_mark.RunMark) -> None:
        """Begins with what is durable of its fragments."""
        e, place = self._assembly.experiment, self._place
        if run_mark.begun(self._folder) != mark:
            raise DurableStateError(f"{self._folder}: is not of the authority's run")
        self._locks.enter_context(owned_fragments(self._folder, self._own))
        uplink, keep = self._uplink, e.recovery.keep_versions
        durable = DurableState(self._folder, self._assembly.layout, uplink.record, self._stop, mark.run, keep)
        durable.sweep(self._own)
        state = dealt_or_told(durable.restore(self._model), e, uplink.record)
        memory.return_freed()
        core = Part(e.sync, e.train.steps, state, self._own, durable.lineage)
        workdir = self._folder.parent
        tapes = Tapes(workdir, e, self._assembly.layout, uplink.record, run=mark.run)
        tape = tapes.syncer(state, self._model, lineage=durable.lineage, part=place.part)
        worker = SyncerWorker(
            core, self._model, uplink.record, durable=durable, tape=tape, pass_on=uplink.say
        )
        server = PartServer(self._terms, self._security, self._listening, worker, uplink, HANDSHAKE)
        uplink.mark = mark
        self._worker, self._server = worker, server
        worker.start()
        server.start()
