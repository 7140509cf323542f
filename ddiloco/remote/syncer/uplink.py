"""A part's end of its stream with the authority: connects again whenever it breaks."""

from __future__ import annotations

import collections
import dataclasses
import secrets
import threading
from collections.abc import Callable, Iterator

import grpc

from ddiloco.protocol import news
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.compatibility import Terms
from ddiloco.remote.wire.record_messages import record_message
from ddiloco.remote.wire.record_queue import RecordQueue
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.validation import parse
from ddiloco.schema import codec
from ddiloco.settings.remote import RemoteConfig, backoff
from ddiloco.storage.run_mark import RunMark
from ddiloco.telemetry import records


@dataclasses.dataclass(frozen=True)
class PartPlace:
    """Which of the syncer's parts this process is, and where it answers learners."""

    part: int  # from 0
    parts: int  # S
    address: str  # HOST:PORT


class Uplink:
    """Any thread may have it say something, which never waits; what comes is taken on one thread."""

    def __init__(
        self,
        authority: str,
        place: PartPlace,
        terms: Terms,
        security: Security,
        config: RemoteConfig,
        take: Callable[[pb.ToPart], None],
    ) -> None:
        """`authority`: HOST:PORT. `take` gets every message, and may take its time."""
        self.mark = RunMark("", "")  # of what the part has loaded
        self.refusal: str | None = None  # why there will never be a connection any more
        self.outdated = False  # whether the run was started again: this process cannot go on with it
        self.over = threading.Event()  # nothing comes any more
        self._authority, self._place, self._terms = authority, place, terms
        self._security, self._config, self._take = security.of_parts(), config, take
        self._process = secrets.randbits(52)
        self._change = threading.Condition()
        self._words: collections.deque[pb.FromPart] = collections.deque()
        self._records = RecordQueue()
        self._connection = 0
        self._control: grpc.Call | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="uplink", daemon=True)

    def start(self) -> None:
        """Begins to connect."""
        self._thread.start()

    def say(self, word: news.Word) -> None:
        """Tells the authority; without a connection it is lost: a roll call has all of them said again."""
        self._put(pb.FromPart(word=codec.message_of(word)))

    def record(self, record: records.Record) -> None:
        """Passes a record on to the run's monitor, if the authority is away then later."""
        message = record_message(record)
        with self._change:
            self._records.append(message)
            self._change.notify_all()

    def finish(self, timeout: float) -> None:
        """Says what is left and a goodbye, if there is a connection."""
        with self._change:
            if self._control is not None:
                self._change.wait_for(lambda: not self._records or self._control is None, timeout)
        self._put(pb.FromPart(goodbye=True))
        self._closing.set()
        self._thread.join(1.0)  # the authority ends the call once it has heard the goodbye
        with self._change:
            if self._control is not None:
                self._control.cancel()
        self._thread.join(5.0)

    def _put(self, message: pb.FromPart) -> None:
        with self._change:
            self._words.append(message)
            self._change.notify_all()

    def _run(self) -> None:
        failures = 0
        while not self._closing.is_set():
            failures += 1
            try:
                self._connect()
                failures = 0
            except grpc.RpcError as error:
                if wire.permanent(error.code()):
                    self.refusal = error.details() or error.code().name
                self.outdated = error.code() is wire.CONNECT_ANEW
            except Exception as error:  # of what it has taken: this process is of no use any more
                self.refusal = f"{type(error).__name__}: {error}"
            finally:
                with self._change:
                    self._control = None
                    self._connection += 1
                    self._change.notify_all()
            if self.refusal is not None or self.outdated:
                break
            self._closing.wait(backoff(max(1, failures), self._config.longest_backoff))
        self.over.set()

    def _connect(self) -> None:
        """Runs one connection to its end; raises if none came about."""
        with self._change:
            self._connection += 1
            self._words.clear()
            number = self._connection
        options = wire.options(self._config.keepalive)
        with self._security.channel(self._authority, options) as channel:
            control = channel.stream_stream(wire.PART)(
                self._messages(number), metadata=self._security.metadata
            )
            with self._change:
                self._control = control
            begun = False
            try:
                for data in control:
                    begun = True
                    self._take(parse(pb.ToPart, data))
            except grpc.RpcError:
                if not begun:
                    raise
            finally:
                control.cancel()

    def _messages(self, number: int) -> Iterator[bytes]:
        place = self._place
        hello = pb.FromPart.Hello(
            version=wire.VERSION,
            fingerprint=self._terms.fingerprint,
            rules=self._terms.rules,
            part=place.part,
            parts=place.parts,
            process=self._process,
            address=place.address,
            run=self.mark.run,
            start=self.mark.start,
        )
        yield pb.FromPart(hello=hello).SerializeToString()
        while (message := self._next(number)) is not None:
            yield message.SerializeToString()

    def _next(self, number: int) -> pb.FromPart | None:
        with self._change:
            while self._connection == number:
                if self._words and not (self._records and self._words[0].HasField("goodbye")):
                    return self._words.popleft()
                if self._records:
                    batch = self._records.batch()
                    self._change.notify_all()
                    return pb.FromPart(records=batch)
                self._change.wait()
            return None
