"""A peer without credentials that means no good: whatever reaches a port, but a token."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator

import grpc

from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.security import Security

IDLE = 60  # silent connections or calls, at a time
_TIMEOUT = 3.0  # seconds
_CALLS = (wire.CONTROL, wire.UPDATES, wire.OFFERS, wire.PEERS, wire.DONATE)


class UnauthorizedClient:
    """Turns to one port after the other, in a way that it draws each time."""

    def __init__(self, address: str, count: Callable[[str], None]) -> None:
        """`address`: HOST:PORT. `count` is called with each attempt, and how it ended."""
        self._address, self._count = address, count
        self._rng = random.Random(address)

    def run(self, stop: threading.Event) -> None:
        """Runs until `stop`."""
        deeds = (self._idle_connections, self.noise, self._flood, self._calls)
        while not stop.wait(self._rng.uniform(0.1, 0.5)):
            deed = self._rng.choice(deeds)
            try:
                deed(stop)
                self._count(f"stranger, {deed.__name__.strip('_')}: ended")
            except OSError as error:
                self._count(f"stranger, {deed.__name__.strip('_')}: {type(error).__name__}")

    def _connections(self, number: int) -> list[socket.socket]:
        host, port = self._address.rsplit(":", 1)
        found = []
        with contextlib.suppress(OSError):  # the syncer is down, or lets no more in
            for _ in range(number):
                found.append(socket.create_connection((host, int(port)), _TIMEOUT))
        return found

    def _idle_connections(self, stop: threading.Event) -> None:
        connections = self._connections(IDLE)
        stop.wait(self._rng.uniform(0.0, 4.0))
        for connection in connections:
            connection.close()

    def noise(self, stop: threading.Event | None = None) -> None:
        """Random bytes, now and then after the words with which HTTP/2 begins."""
        for connection in self._connections(20):
            with connection, contextlib.suppress(OSError):
                if self._rng.random() < 0.5:
                    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
                connection.sendall(self._rng.randbytes(self._rng.randrange(1, 20_000)))

    def _flood(self, stop: threading.Event) -> None:
        for _ in range(200):
            for connection in self._connections(1):
                connection.close()

    def _calls(self, stop: threading.Event) -> None:
        """Calls of every kind with no token or a wrong one: silent, with a hello, or with noise."""
        token = self._rng.choice((None, "", "a token that is none", "x" * 6000))
        sent = self._rng.choice(
            ([], [b""], [self._rng.randbytes(99)], [pb.FromLearner().SerializeToString()])
        )
        never = threading.Event()

        def messages() -> Iterator[bytes]:
            yield from sent
            never.wait(_TIMEOUT)

        with Security().channel(self._address, wire.options(5.0)) as channel:
            calls = [
                channel.stream_stream(kind)(messages(), metadata=Security(token).metadata, timeout=_TIMEOUT)
                for kind in _CALLS
                for _ in range(IDLE // 4)
            ]
            for call in calls:
                try:
                    for _ in call:
                        self._count("stranger: A CALL WAS ANSWERED")
                except grpc.RpcError as error:
                    self._count(f"stranger, a call: {error.code().name}")
            never.set()
