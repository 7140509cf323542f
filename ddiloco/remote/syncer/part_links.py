"""The authority's end of its parts: a stream with each, on which news go out and words come in."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from ddiloco.protocol import events, news
from ddiloco.protocol.parts import FromPart, PartConnected, ToPart
from ddiloco.remote.syncer.session import Session
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.compatibility import Terms
from ddiloco.remote.wire.record_messages import part_record
from ddiloco.remote.wire.record_queue import Received
from ddiloco.remote.wire.security import PART, Security, host_of
from ddiloco.remote.wire.validation import WireError, parse
from ddiloco.schema import codec
from ddiloco.storage.run_mark import RunMark
from ddiloco.telemetry import records

MOST_WAITING = 100_000  # messages to a part that does not read; then its connection is ended


class _Link:
    """The connection of one part's process."""

    def __init__(self, part: int, process: int, end: Callable[[], object]) -> None:
        """`end` ends the call, also where the part reads nothing any more."""
        self.part, self.process = part, process
        self.listens = False  # whether its roll call has begun, before which no news is for it
        self._end = end
        self._waiting: queue.SimpleQueue[pb.ToPart | None] = queue.SimpleQueue()

    def say(self, message: pb.ToPart) -> None:
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put(message)
        else:
            self._end()

    def messages(self) -> Iterator[bytes]:
        while (message := self._waiting.get()) is not None:
            yield message.SerializeToString()

    def close(self) -> None:
        self._waiting.put(None)


class PartLinks:
    """For any thread; what the worker passes on to a part keeps its order.

    Attributes:
      count: S.
    """

    def __init__(
        self,
        count: int,
        terms: Terms,
        security: Security,
        mark: RunMark,
        send: Callable[[FromPart | PartConnected], None],
        record: Callable[[records.Record], None],
    ) -> None:
        """`mark`: of what is on the disk. `send`: puts something into the worker's inbox."""
        self.count = count
        self._terms, self._security, self._mark = terms, security, mark
        self._send, self._record = send, record
        self._change = threading.Condition()
        self._links: dict[int, _Link] = {}
        self._addresses = [""] * count
        self._sessions: dict[str, Session] = {}
        self._received: dict[tuple[int, int], Received] = {}  # by part and process
        self._leaving = False

    # What the worker and the server call.

    def pass_on(self, one: ToPart | PartConnected) -> None:
        """Tells one part or all of them; a part is told nothing before its roll call."""
        with self._change:
            match one:
                case PartConnected(part):
                    if part in self._links:
                        self._links[part].listens = True
                        self._links[part].say(pb.ToPart(roll_ends=True))
                case ToPart(part, message):
                    self._say(pb.ToPart(news=codec.message_of(message)), part)

    def forward(self, event: events.OfferFailed) -> None:
        """Tells the part that asked."""
        with self._change:
            message = pb.ToPart(offer_failed=codec.message_of(event))
            self._say(message, event.round.fragment % self.count)

    def opened(self, session: Session) -> None:
        """A learner may come to the parts in this session."""
        with self._change:
            self._sessions[session.name] = session
            for link in self._links.values():
                link.say(_session_message(session))

    def closed(self, session: Session) -> None:
        """It may not any longer."""
        with self._change:
            self._sessions.pop(session.name, None)
            for link in self._links.values():
                link.say(_session_message(session, over=True))

    def tell_where(self, session: Session) -> None:
        """Tells a learner where the parts answer."""
        with self._change:
            session.say(pb.ToLearner(parts_at=pb.PartsAt(addresses=self._addresses)), replaces=True)

    def leave(self, timeout: float) -> bool:
        """Has the parts end once all that they have merged is noted; whether they did."""
        deadline = time.monotonic() + timeout
        with self._change:
            self._leaving = True
            for link in self._links.values():
                link.say(pb.ToPart(leave=True))
            while self._links and (left := deadline - time.monotonic()) > 0:
                self._change.wait(left)
            return not self._links

    def _say(self, message: pb.ToPart, part: int | None = None) -> None:
        for link in self._links.values():
            if link.listens and part in (None, link.part):
                link.say(message)

    # The call of a part, in threads of gRPC's.

    def answer(
        self, first: bytes, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """What the call gives; `first`: its first request, which has come."""
        link = self._connected(self._hello(first, context), context)
        if not context.add_callback(lambda: self._gone(link)):
            self._gone(link)
        reader = threading.Thread(
            target=self._read, args=(link, requests), name=f"part-{link.part}", daemon=True
        )
        reader.start()
        yield from link.messages()

    def _hello(self, first: bytes, context: grpc.ServicerContext) -> pb.FromPart.Hello:
        if self._security.caller(context).learner not in (None, PART):
            whose = "these credentials are not of a syncer's process"
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, whose)
        try:
            message = parse(pb.FromPart, first)
        except WireError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        hello = message.hello
        misfit = self._misfit(hello)
        if misfit is not None:
            self._record(records.Alarm(f"part {hello.part} of the syncer is refused: {misfit}", time.time()))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, misfit)
        if hello.run and RunMark(hello.run, hello.start) != self._mark:
            context.abort(wire.CONNECT_ANEW, "the run was started again: read it from the disk")
        return hello

    def _misfit(self, hello: pb.FromPart.Hello) -> str | None:
        """In one line, why the part is none of this run."""
        if hello.version != wire.VERSION:
            return f"the authority speaks version {wire.VERSION} of the wire, the part {hello.version}"
        if (hello.parts, hello.part < hello.parts) != (self.count, True):
            return f"it is part {hello.part} of {hello.parts}, where there are {self.count}"
        return self._terms.misfit(hello.fingerprint, hello.rules)

    def _connected(self, hello: pb.FromPart.Hello, context: grpc.ServicerContext) -> _Link:
        link = _Link(hello.part, hello.process, context.cancel)
        begin = pb.ToPart.Begin(run=self._mark.run, start=self._mark.start)
        with self._change:
            present = self._links.get(hello.part)
            if present is not None and present.process != hello.process:
                context.abort(grpc.StatusCode.UNAVAILABLE, f"another process is part {hello.part}")
            if present is not None:
                present.close()
            self._links[hello.part] = link
            link.say(pb.ToPart(leave=True) if self._leaving else pb.ToPart(begin=begin))
            for session in self._sessions.values():
                link.say(_session_message(session))
            self._addresses[hello.part] = _reached(hello.address, context.peer())
            sessions = list(self._sessions.values())
        for session in sessions:
            self.tell_where(session)
        self._send(PartConnected(hello.part))
        return link

    def _gone(self, link: _Link) -> None:
        link.close()
        with self._change:
            if self._links.get(link.part) is link:
                del self._links[link.part]
                self._change.notify_all()

    def _read(self, link: _Link, requests: Iterator[bytes]) -> None:
        try:
            for data in _until_it_breaks(requests):
                if self._links.get(link.part) is not link or not self._take(link, parse(pb.FromPart, data)):
                    break
        except (WireError, ValueError) as error:
            alarm = f"part {link.part} of the syncer: what it sent cannot be read: {error}"
            self._record(records.Alarm(alarm, time.time()))
        finally:
            self._gone(link)

    def _take(self, link: _Link, message: pb.FromPart) -> bool:
        """Takes a part's message; whether another may come. Raises WireError or ValueError: it is none."""
        match message.WhichOneof("kind"):
            case "word":
                self._send(FromPart(link.part, self._checked(link.part, codec.told_by(message.word))))
            case "records":
                self._take_records(link, message.records)
            case "goodbye":
                return False
        return True

    def _checked(self, part: int, word: news.Word) -> news.Word:
        if isinstance(word, news.Committed):
            p = word.round.fragment
            if p >= self._terms.num_fragments or p % self.count != part:
                raise WireError("malformed message", f"fragment {p} is not of part {part}")
        return word

    def _take_records(self, link: _Link, batch: pb.Records) -> None:
        received = self._received.setdefault((link.part, link.process), Received(batch.first))
        if lost := received.lost(batch):
            self._record(records.Noted("records_lost", {"part": link.part, "count": lost}, time.time()))
        for one in received.new(batch):
            self._record(part_record(one))


def _until_it_breaks(requests: Iterator[bytes]) -> Iterator[bytes]:
    """The messages up to where the stream breaks, for which gRPC raises bare Exceptions."""
    with contextlib.suppress(Exception):
        yield from requests


def _session_message(session: Session, over: bool = False) -> pb.ToPart:
    return pb.ToPart(
        session=pb.ToPart.Session(
            name=session.name,
            learner=session.learner,
            process=session.process,
            over=over,
            hosts=session.hosts,
        )
    )


def _reached(address: str, peer: str) -> str:
    """Where learners reach a part that listens at HOST:PORT; its peer's host if that is every one."""
    host, _, port = address.rpartition(":")
    return f"{host_of(peer)}:{port}" if host in ("", "0.0.0.0", "[::]", "*") else address
