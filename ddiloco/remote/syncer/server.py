"""A shard's end of the wire: a gRPC server that turns calls into events, and links into calls."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc
import numpy as np

from ddiloco.protocol import events
from ddiloco.protocol.messages import NOTHING_MERGED, Watermark
from ddiloco.remote.syncer.admission import FURTHEST, LEAP, Admission
from ddiloco.remote.syncer.downlink import Downlink, NewestFragments
from ddiloco.remote.syncer.fragment_calls import FragmentCalls, drop
from ddiloco.remote.syncer.listening import Listening
from ddiloco.remote.syncer.management import Management
from ddiloco.remote.syncer.record_receiver import RecordIntake
from ddiloco.remote.syncer.rendezvous import HostRendezvous
from ddiloco.remote.syncer.session import Session
from ddiloco.remote.syncer.shard_records import ShardRecords
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.calls import Call, Handler, Refused, Wakeup, event_loop
from ddiloco.remote.wire.compatibility import Terms
from ddiloco.remote.wire.event_messages import MAX_REASON_LENGTH, by_fragment, learner_event
from ddiloco.remote.wire.measuring import Probes
from ddiloco.remote.wire.security import Security, donor_address
from ddiloco.remote.wire.validation import WireError, parse
from ddiloco.telemetry import records
from ddiloco.workers.exchange import CheckpointWritten, Leave
from ddiloco.workers.links import LearnerLink

MESSAGES = 2000  # of a learner at once, that 500 a second bring back; eight records count as one
JOINING = 2.0  # seconds from a learner's connection to its join, if it has joined before
MAX_PEERS = 64  # of which a learner hears
REJOINS = 64  # of a learner at once, that a second each brings back; each is a write to the disk


class SyncerPort(Protocol):
    """A shard as its server reaches it, from any thread: a SyncerWorker."""

    def connect(self, learner: int, incarnation: int, link: LearnerLink) -> None:
        """Sets how to reach a learner, before its first event."""

    def send(self, event: events.SyncerEvent | CheckpointWritten) -> None:
        """Takes an event; never waits."""

    def take_offer(self, event: events.FragmentArrived, arrays: Sequence[np.ndarray]) -> None:
        """Takes a fragment, encoded."""

    def furthest(self, learner: int) -> Watermark:
        """Of the learner's work, the furthest that is merged, or may be yet."""
        return NOTHING_MERGED

    @property
    def versions(self) -> Sequence[int]:
        """By fragment, the newest."""
        return ()

    @property
    def crowded(self) -> bool:
        """Whether so many messages wait that no more are to be read."""
        return False

    def boundary_seconds(self, learner: int) -> float:
        """Seconds that a learner takes for the steps that its devices have at a time; 0.0: not known."""
        return 0.0


class OverSyncer(SyncerPort):
    """A shard of a run that is over."""


class SyncerServer:
    """Listens for learners; every connection is a session, and a session is their link.

    Memory by learner: one fragment for each round that it was asked for, and what gRPC holds of one message.
    """

    def __init__(
        self,
        terms: Terms,
        security: Security,
        listening: Listening,
        syncer: SyncerPort,
        record: Callable[[object], None],
        run: str = "",
        management: Management | None = None,
        shard: int = 0,
    ) -> None:
        """`run`: its id. `management`: answers an operator. `shard`: which of S it is."""
        self._fragments = terms.fragments(shard)
        self._addresses: Sequence[str] = ()  # of all shards
        self.intake = RecordIntake((lambda told: None) if shard else record)  # learners' go to the first
        self._terms, self._security = terms, security
        self._syncer, self._record = syncer, record
        self._listening, self._run = listening, run
        self._peers_token = secrets.token_hex(16)
        self._admission = Admission(terms, run, shard)
        self._coming_and_going = threading.RLock()  # one session at a time begins, or ends
        self._rejoins, self._messages = Allowances(REJOINS, 1.0), Allowances(MESSAGES, 500.0)
        self._lock = threading.Lock()
        self._over = False
        self._open = asyncio.Event()  # until then learners' messages stay in their outboxes
        self._sessions: dict[str, Session] = {}  # by name
        self._of_learners: dict[int, Session] = {}  # the same
        self.away: set[int] = set()  # disconnected learners without a goodbye
        self._newest_incarnation: dict[int, int] = {}
        self._newest = NewestFragments()
        self._changed = threading.Condition(self._lock)  # of the two above
        self._calls = FragmentCalls(terms, self._find, syncer.send, syncer.take_offer, record, shard)
        self._management = management or Management(security, terms.max_learners)
        self._management.attach(self._all_sessions, self._end)
        self._handlers: dict[str, Handler] = {
            "Manage": self._manage,
            "Control": self._control,
            "Peers": self._peers,
            "Measure": Probes().answer,
            **self._calls.handlers,
        }
        self._host_rendezvous = HostRendezvous(terms, security)
        if not shard:
            self._handlers["Rendezvous"] = self._rendezvous
        if terms.shards > 1 and not shard:
            of_shards = ShardRecords(terms, security, run, listening.handshakes, record)
            self._handlers["Shard"] = of_shards.answer
        listening.server.refused = self._without_credentials

    def start(self) -> int:
        """Answers from now on; returns the port. Raises ConfigError: it is not available."""
        return self._listening.begin(self._handlers, self._calls.answers)

    def open(self) -> None:
        """Begins to take learners' messages; learners that connected earlier have kept theirs until now."""
        event_loop().call(self._open.set)

    def send_addresses(self, addresses: Sequence[str]) -> None:
        """Sends all learners, present and future, the addresses of all shards."""
        with self._lock:
            self._addresses = addresses
            sessions = list(self._sessions.values())
        for session in sessions:
            session.say(pb.ToLearner(shards_at=pb.ShardsAt(addresses=addresses)), replaces=True)

    @property
    def connected(self) -> int:
        """Number of connected learners."""
        with self._lock:
            return len(self._sessions)

    def know(self, incarnations: Sequence[tuple[int, int]]) -> None:
        """Takes (learner, newest incarnation) of an earlier syncer; new processes begin above these."""
        with self._lock:
            for learner, incarnation in incarnations:
                self._hear(learner, incarnation)

    def gather(self, timeout: float, stop: threading.Event) -> None:
        """Waits until all learners have joined, `timeout` seconds have passed since the first, or `stop`."""
        deadline = None
        drained = sum(map(self._management.drained, range(self._terms.max_learners)))
        awaited = self._terms.num_learners - drained
        with self._lock:
            while (here := len(self._newest_incarnation)) < awaited and not stop.is_set():
                now = time.monotonic()
                if deadline is None and here:
                    deadline = now + timeout
                if deadline is not None and now >= deadline:
                    return
                self._changed.wait(0.2)

    def stop(
        self, timeout: float, reconnect_timeout: float = 0.0, last: Callable[[], object] = lambda: None
    ) -> bool:
        """Ends the run for all learners and waits for their goodbyes; returns whether all arrived.

        Then `last` is called, before the server stops. Learners that are `away` have `reconnect_timeout`
        seconds to connect. Unjoined learners need no goodbye: one may compile for minutes, while an engine
        counts the seconds until it kills this process.
        """
        begun = time.monotonic()
        with self._lock:
            self._over = True
            self.open()
            event_loop().call(self._host_rendezvous.end)
            for session in self._sessions.values():
                session.deliver(Leave())
            while (now := time.monotonic()) < begun + timeout and (
                (self.away and now < begun + reconnect_timeout)
                or any(s.incarnation or now < s.heard_at + JOINING for s in self._sessions.values())
            ):
                self._changed.wait(0.2)
            late = list(self._sessions.values())
        for session in late:
            self._end(session, "it did not leave in time")
        last()
        self.close()
        self.intake.end()
        return not late

    def close(self) -> None:
        """Stops serving; learners without the end of the run look for another syncer."""
        self.open()
        self._listening.stop(grace=1.0)

    def _all_sessions(self) -> list[Session]:
        with self._lock:
            return list(self._sessions.values())

    # Calls run in the event loop, and must not wait for anything else.

    async def _control(self, call: Call) -> None:
        session = await self._welcome_session(await self._listening.handshakes.first(call), call)
        changed, reader = Wakeup(), asyncio.create_task(self._read(session, call))
        try:
            with session.wakeups.added(changed.set):
                over = False
                while not over:
                    over = session.over  # before its last messages are taken
                    for message in session.messages():
                        await call.write(message)
                    if not over:
                        await changed.wait()
        finally:
            self._end(session, "connection lost")
            reader.cancel()
        if session.reason.startswith("malformed"):
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, session.reason)

    async def _manage(self, call: Call) -> None:
        await self._management.answer(await self._listening.handshakes.first(call), call)

    async def _rendezvous(self, call: Call) -> None:
        await self._host_rendezvous.answer(await self._listening.handshakes.first(call), call)

    async def _peers(self, call: Call) -> None:
        session = self._calls.session(call)
        with session.call("peers", call):  # for as long as the answer is not read
            await call.write(self._peers_of(session.learner).SerializeToString())

    def _peers_of(self, own: int) -> pb.Peers:
        """The next learners after the asking one that may have an inner state to give."""
        most = self._terms.max_learners
        with self._lock:
            following = (self._of_learners.get((own + i) % most) for i in range(1, most))
            givers = (s for s in following if s is not None and s.may_give)
            others = [*itertools.islice(givers, MAX_PEERS)]
        # Of the fastest, so that a learner that claims to be slow delays no other.
        seconds = min(filter(None, (self._syncer.boundary_seconds(s.learner) for s in others)), default=0.0)
        return pb.Peers(addresses=[s.donor for s in others], boundary_seconds=seconds)

    # Sessions.

    def _without_credentials(self, host: str) -> None:
        self._record(drop(None, "wire: wrong token"))
        self._alarm(f"a call from {host} without the join token was refused")

    def _find(self, name: str) -> Session | None:
        with self._lock:
            return self._sessions.get(name)

    async def _welcome_session(self, first: bytes, call: Call) -> Session:
        """The session of a learner that fits this run; raises Refused otherwise."""
        try:
            message = parse(pb.FromLearner, first)
            if message.WhichOneof("kind") != "hello":
                raise WireError("unexpected message", "a connection begins with a hello")
        except WireError as error:
            self._calls.count(None, error)
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        furthest = NOTHING_MERGED
        if not message.hello.session:
            # For a process that goes on with its state; what is merged later the core finds as it joins.
            loop, learner = asyncio.get_running_loop(), message.hello.learner
            furthest = await loop.run_in_executor(None, self._syncer.furthest, learner)
        with self._coming_and_going:
            return self._admitted(message.hello, furthest, call)

    def _admitted(self, hello: pb.Hello, furthest: Watermark, call: Call) -> Session:
        caller = self._security.caller(call.context)
        with self._lock:
            known = self._newest_incarnation.get(hello.learner, 0)
            present = self._of_learners.get(hello.learner)
        refusal = self._admission.refusal(hello, caller, present, known, time.monotonic())
        if refusal is not None:
            self._record(drop(None, f"wire: {refusal.reason}"))
            if refusal.alarm is not None:
                self._alarm(refusal.alarm)
            raise Refused(refusal.code, refusal.sentence)
        if present is not None:
            self._end(present, "connected again" if present.process == hello.process else "replaced")
        self._admission.admitted(hello.learner, hello.process)
        donor = donor_address(call.context.peer(), hello.donor_port, hello.donor_host)
        name = secrets.token_hex(16)
        moved = lambda size: self._record(records.Transferred(hello.learner, sent=0, received=size))  # noqa: E731
        timed = functools.partial(self._calls.timed, hello.learner, "an update")
        down = Downlink(self._newest, moved, max(1, hello.hosts), hello.learner, timed)
        room = self._terms.room(hello.learner)
        session = Session(name, hello.learner, hello.process, down, donor, caller, room)
        session.control = call
        session.newest_incarnation = max(known, hello.process)
        hosts = None if hello.hosts >= room else max(1, hello.hosts)
        whether = {"newer": 0 < known < hello.process, "began": not hello.session, "hosts": hosts}
        self.intake.joined(hello.learner, hello.process, **whether)
        accepted = pb.Accepted(
            session=session.name,
            newest_incarnation=known,
            run=self._run,
            peers_token=self._peers_token,
            furthest=dataclasses.asdict(furthest),
            versions=self._syncer.versions,
            fragments_at=self._listening.fragments_at,
        )
        session.say(pb.ToLearner(accepted=accepted))
        with self._lock:
            self._sessions[session.name] = self._of_learners[session.learner] = session
            self.away.discard(hello.learner)
            addresses = self._addresses
        if addresses:
            session.say(pb.ToLearner(shards_at=pb.ShardsAt(addresses=addresses)), replaces=True)
        self._management.limit(session)
        if self._over or self._management.drained(hello.learner):  # it was disconnected at the end
            session.deliver(Leave())
        return session

    async def _read(self, session: Session, call: Call) -> None:
        reason = "connection lost"
        try:
            await self._open.wait()
            session.heard_at = time.monotonic()
            while (data := await call.read()) is not None:
                session.heard_at = time.monotonic()
                message = parse(pb.FromLearner, data)
                await self._wait_for_turn(session, 1 + len(message.records.records) // 8)
                if self._hear_message(session, message):
                    reason = events.LEFT
                    break
        except WireError as error:
            self._calls.count(session.learner, error)
            reason = f"malformed: {error}"
        except Exception as error:  # gRPC raises bare Exceptions where a stream breaks
            reason = str(error).splitlines()[0] if str(error) else "connection lost"
        finally:
            self._end(session, reason)

    async def _wait_for_turn(self, session: Session, cost: int) -> None:
        """Delays reading until others are served too; the transport slows faster senders."""
        while not session.over and not self._over and not self._has_turn(session, cost):
            await asyncio.sleep(0.05)

    def _has_turn(self, session: Session, cost: int) -> bool:
        return not self._syncer.crowded and self._messages.take(session.learner, time.monotonic(), cost)

    def _hear_message(self, session: Session, message: pb.FromLearner) -> bool:
        """Passes on a learner's message; returns whether it was the last one."""
        match message.WhichOneof("kind"):
            case "goodbye":
                return True
            case "records":
                self.intake.take(session.learner, session.process, message.records)
            case "checkpoint_written":
                m = message.checkpoint_written
                versions = () if m.problem else tuple(by_fragment(m.versions, self._terms.num_fragments))
                problem = m.problem[:MAX_REASON_LENGTH]
                self._syncer.send(CheckpointWritten(session.learner, m.snapshot, versions, problem))
            case _:
                own = session.learner, len(self._fragments), session.report
                event = learner_event(message, *own)
                if isinstance(event, events.StepReported):
                    session.report = event.report
                self._hear_event(session, event)
        return False

    def _hear_event(self, session: Session, event: events.SyncerEvent) -> None:
        if isinstance(event, events.OfferFailed):
            self._syncer.send(event)
            return
        report = event.report if isinstance(event, events.StepReported) else event
        # At another shard the number may have become as large as that of any process.
        most = max(session.newest_incarnation + LEAP, FURTHEST if self._terms.shards > 1 else 0)
        if report.incarnation > most:
            raise WireError("incarnation out of range", str(report.incarnation))
        if report.incarnation != session.incarnation:
            if not self._rejoins.take(session.learner, time.monotonic()):
                raise WireError("too many incarnations", f"more than {REJOINS} at once")
            with self._coming_and_going:
                if not session.over:  # else the loss of this incarnation would go unnoticed
                    self._begins(session, report.incarnation)
                    self._syncer.send(event)
            return
        self._syncer.send(event)

    def _begins(self, session: Session, incarnation: int) -> None:
        self._syncer.connect(session.learner, incarnation, session)
        session.incarnation = incarnation
        session.newest_incarnation = max(session.newest_incarnation, incarnation)
        with self._lock:
            self._hear(session.learner, incarnation)

    def _hear(self, learner: int, incarnation: int) -> None:
        known = self._newest_incarnation.get(learner, 0)
        self._newest_incarnation[learner] = max(known, incarnation)
        self._changed.notify_all()

    def _end(self, session: Session, reason: str) -> None:
        """Closes a session; the core is notified that its learner is lost."""
        with self._coming_and_going:
            # The learner sees the end, and may be here again, before all of this is done.
            if session.close(reason):
                self._ended(session, reason)

    def _ended(self, session: Session, reason: str) -> None:
        self.intake.lost(session.learner, session.process, reason == events.LEFT)
        with self._lock:
            self._sessions.pop(session.name, None)
            if self._of_learners.get(session.learner) is session:
                del self._of_learners[session.learner]
            if reason != events.LEFT:
                self.away.add(session.learner)
            self._changed.notify_all()
        if session.incarnation:
            self._syncer.send(events.LearnerLost(session.learner, session.incarnation, reason))

    def _alarm(self, sentence: str) -> None:
        self._record(records.Alarm(sentence, time.time()))


class Allowances:
    """By learner, a bucket that fills up again; for several threads."""

    def __init__(self, most: float, a_second: float) -> None:
        """`most`: at once. `a_second`: how many a second brings back."""
        self._most, self._a_second = most, a_second
        self._lock = threading.Lock()
        self._left: dict[int, tuple[float, float]] = {}  # by learner: how many, and when

    def take(self, learner: int, now: float, cost: float = 1.0) -> bool:
        """Whether it may once more; `now` in monotonic seconds. What costs more than all only empties it."""
        with self._lock:
            left, then = self._left.get(learner, (self._most, now))
            left = min(self._most, left + (now - then) * self._a_second)
            enough = left >= min(cost, self._most)
            self._left[learner] = (max(0.0, left - cost) if enough else left, now)
            return enough
