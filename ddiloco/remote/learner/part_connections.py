"""A learner's connections with the parts of its syncer, as long as the one with the authority lasts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import grpc

from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.remote.learner.streams import Streams, wait_for
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.validation import WireError, parse
from ddiloco.settings.remote import RemoteConfig, backoff
from ddiloco.workers.transfer import Offer

if TYPE_CHECKING:
    MakeStreams = Callable[
        [list[grpc.Channel], Sequence[tuple[str, str]], Callable[[Exception], None], pb.Order.Streams],
        Streams,
    ]


class _PartConnection:
    """Keeps the connection with one part: a part that dies comes back, perhaps at another address."""

    def __init__(self, connections: PartConnections, part: int, parts: int, address: str) -> None:
        self.address, self._place = address, pb.Order.Streams(part=part, parts=parts, address=address)
        self.streams: Streams | None = None  # while there is a connection
        self._connections = connections
        self._lock = threading.Lock()
        self._control: grpc.Call | None = None
        self._closing = threading.Event()
        self.thread = threading.Thread(target=self._run, name="part", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            if self._control is not None:
                self._control.cancel()

    def _run(self) -> None:
        failures, longest = 0, self._connections.config.longest_backoff
        while not self._closing.is_set():
            failures += 1
            begun = time.monotonic()
            try:
                self._connect()
            except grpc.RpcError as error:
                if error.code() is wire.CONNECT_ANEW and not self._closing.is_set():
                    self._connections.broke(WireError("a part of the syncer has lost messages"))
                    return
                if error.code() is grpc.StatusCode.CANCELLED:
                    failures = 0
            except Exception as error:  # whatever it is, all must be connected again
                self._connections.broke(error)
                return
            if time.monotonic() - begun > longest:  # a connection that lasted is no failure to make one
                failures = 1
            self._closing.wait(backoff(max(1, failures), longest))

    def _connect(self) -> None:
        """Runs one connection to its end; raises grpc.RpcError when it broke, or could not be made."""
        made = self._connections
        with contextlib.ExitStack() as stack:
            channels = [
                stack.enter_context(made.security.channel(self.address, wire.options(made.config.keepalive)))
                for _ in range(made.config.connections)
            ]
            control = channels[0].stream_stream(wire.CONTROL)(iter(()), metadata=made.metadata)
            stack.callback(control.cancel)
            with self._lock:
                self._control = control
                if self._closing.is_set():
                    return
            broke = lambda error: control.cancel()  # noqa: E731
            streams = made.make_streams(channels, made.metadata, broke, self._place)
            stack.callback(streams.close)
            streams.start()
            self.streams = streams
            try:
                for data in control:
                    made.take(parse(pb.ToLearner, data))
            finally:
                self.streams = None


class PartConnections:
    """For any thread. What parts say goes to the learner's worker as what an only syncer says."""

    def __init__(
        self,
        metadata: Sequence[tuple[str, str]],
        security: Security,
        config: RemoteConfig,
        make_streams: MakeStreams,
        take: Callable[[pb.ToLearner], None],
        broke: Callable[[Exception], None],
    ) -> None:
        """`metadata`: of every call, with the session. `take` gets a part's messages; `broke` hears that all
        must be connected again. `make_streams`: of channels, metadata, what to call when they break, and
        which part they are with."""
        self.metadata, self.security, self.config = metadata, security, config
        self.make_streams, self.take, self.broke = make_streams, take, broke
        self._lock = threading.Lock()
        self._parts: list[_PartConnection | None] = []
        self._closed = False

    def at(self, addresses: Sequence[str]) -> None:
        """Connects with the parts at these addresses; an empty one is of a part that is not there yet."""
        with self._lock:
            if self._closed:
                return
            parts = len(addresses)
            before = self._parts or [None] * parts
            self._parts = [self._moved(before[n], n, parts, address) for n, address in enumerate(addresses)]

    def _moved(
        self, part: _PartConnection | None, number: int, parts: int, address: str
    ) -> _PartConnection | None:
        if part is not None and part.address == address:
            return part
        if part is not None:
            part.close()
        if not address:
            return None
        made = _PartConnection(self, number, parts, address)
        made.start()
        return made

    @property
    def waiting(self) -> int:
        """How many offers no stream has taken yet."""
        with self._lock:
            all_streams = [part.streams for part in self._parts if part is not None]
        return sum(streams.waiting for streams in all_streams if streams is not None)

    def send(self, round_id: RoundId, contribution: Contribution, offer: Offer) -> None:
        """Sends an offer to the part that has the fragment; dropped while that is not there."""
        with self._lock:
            part = self._parts[round_id.fragment % len(self._parts)] if self._parts else None
        streams = None if part is None else part.streams
        if streams is not None:
            streams.send(round_id, contribution, offer)

    def close(self) -> None:
        """Ends all of them, and their threads."""
        with self._lock:
            self._closed = True
            parts = [part for part in self._parts if part is not None]
        for part in parts:
            part.close()
        wait_for(part.thread for part in parts)
