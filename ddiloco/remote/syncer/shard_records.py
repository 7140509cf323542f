"""Records of the syncer's other shards in transit to the first, which writes all of the run's."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from ddiloco.remote.syncer.listening import Handshakes
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.calls import Call, Refused
from ddiloco.remote.wire.compatibility import Terms
from ddiloco.remote.wire.record_messages import record_message, shard_record
from ddiloco.remote.wire.record_queue import Received, RecordQueue
from ddiloco.remote.wire.security import SHARD, Security
from ddiloco.remote.wire.validation import WireError, parse
from ddiloco.settings.remote import RemoteConfig, backoff
from ddiloco.telemetry import records

_CONNECT_SECONDS = 2.0


class ShardRecords:
    """Receives other shards' records, and counts lost ones."""

    def __init__(
        self,
        terms: Terms,
        security: Security,
        run: str,
        handshakes: Handshakes,
        record: Callable[[object], None],
    ) -> None:
        self._terms, self._security, self._run = terms, security, run
        self._handshakes, self._record = handshakes, record
        self._received: dict[tuple[int, int], Received] = {}  # by shard and process

    async def answer(self, call: Call) -> None:
        """Receives a shard's records until its call ends; raises Refused if they cannot be read."""
        hello = self._hello(await self._handshakes.first(call), call)
        try:
            while (data := await call.read()) is not None:
                self._take(hello, parse(pb.FromShard, data).records)
        except (WireError, ValueError) as error:
            problem = f"shard {hello.shard} of the syncer: what it sent cannot be read: {error}"
            self._record(records.Alarm(problem, time.time()))
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, problem) from None
        await call.write(b"")

    def _hello(self, first: bytes, call: Call) -> pb.FromShard.Hello:
        if self._security.caller(call.context).learner not in (None, SHARD):
            whose = "these credentials are not of a shard of the syncer"
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, whose)
        try:
            hello = parse(pb.FromShard, first).hello
        except WireError as error:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        misfit = self._misfit(hello)
        if misfit is not None:
            refused = f"shard {hello.shard} of the syncer is refused: {misfit}"
            self._record(records.Alarm(refused, time.time()))
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, misfit)
        return hello

    def _misfit(self, hello: pb.FromShard.Hello) -> str | None:
        """In one line, why the shard is none of this run."""
        if hello.version != wire.VERSION:
            return f"the first shard speaks version {wire.VERSION} of the wire, this one {hello.version}"
        if (hello.shards, 0 < hello.shard < hello.shards) != (self._terms.shards, True):
            return f"it is shard {hello.shard} of {hello.shards}, where there are {self._terms.shards}"
        if hello.run != self._run:
            return f"it is of run {hello.run[:8]}, the first shard of run {self._run[:8]}"
        return self._terms.misfit(hello.fingerprint, hello.rules)

    def _take(self, hello: pb.FromShard.Hello, batch: pb.Records) -> None:
        received = self._received.setdefault((hello.shard, hello.process), Received(batch.first))
        if lost := received.lost(batch):
            values = {"shard": hello.shard, "count": lost}
            self._record(records.Noted("records_lost", values, time.time()))
        for one in received.new(batch):
            self._record(shard_record(one))


class RecordsLink:
    """Another shard's connection to the first, made again whenever it breaks; any thread may put records in.

    Of too many that wait the oldest are lost, and so are those under way when the connection breaks.
    """

    def __init__(
        self,
        address: Callable[[], str],
        shard: int,
        terms: Terms,
        security: Security,
        config: RemoteConfig,
        run: str,
    ) -> None:
        """`address`: HOST:PORT of the first shard; empty: it is not there."""
        self._address, self._shard, self._terms = address, shard, terms
        self._security, self._config, self._run_id = security.of_shards(), config, run
        self._process = secrets.randbits(52)
        self._change = threading.Condition()
        self._records = RecordQueue()
        self._call: grpc.Future | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)

    def start(self) -> None:
        """Begins to connect."""
        self._thread.start()

    def record(self, record: records.Record) -> None:
        """Passes a record on; if the first shard is away then later."""
        message = record_message(record)
        with self._change:
            self._records.append(message)
            self._change.notify_all()

    def finish(self, timeout: float) -> None:
        """Sends the rest, if there is a connection."""
        with self._change:
            self._closing = True
            self._change.notify_all()
        self._thread.join(timeout)
        if (call := self._call) is not None:
            call.cancel()
        self._thread.join(5.0)

    def _run(self) -> None:
        failures = 0
        while not self._closing:
            begun = time.monotonic()
            with contextlib.suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
                self._connect()
            lasted = time.monotonic() - begun > self._config.longest_backoff
            failures = 1 if lasted else failures + 1
            with self._change:
                self._change.wait_for(lambda: self._closing, backoff(failures, self._config.longest_backoff))

    def _connect(self) -> None:
        """Runs one connection to its end; raises an error of gRPC's when it broke, or could not be made."""
        address = self._address()
        if not address:
            return
        ended = threading.Event()
        with self._security.channel(address, wire.options(self._config.keepalive)) as channel:
            grpc.channel_ready_future(channel).result(_CONNECT_SECONDS)
            send = channel.stream_unary(wire.SHARD)
            call = self._call = send.future(self._messages(ended), metadata=self._security.metadata)
            try:
                call.result()
            finally:
                ended.set()
                with self._change:
                    self._change.notify_all()

    def _messages(self, ended: threading.Event) -> Iterator[bytes]:
        hello = pb.FromShard.Hello(
            version=wire.VERSION,
            fingerprint=self._terms.fingerprint,
            rules=self._terms.rules,
            shard=self._shard,
            shards=self._terms.shards,
            process=self._process,
            run=self._run_id,
        )
        yield pb.FromShard(hello=hello).SerializeToString()
        while not ended.is_set():
            with self._change:
                self._change.wait_for(lambda: self._records or self._closing or ended.is_set())
                if not self._records or ended.is_set():
                    return
                batch = self._records.batch()
            yield pb.FromShard(records=batch).SerializeToString()
