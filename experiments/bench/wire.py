"""How fast fragments travel: round trips over the wire against the same bytes over a raw socket.

A round trip is what a synchronisation moves for one learner: the learner's report, the syncer's question,
the fragment up, the fragment down. Both ends are processes of their own on the loopback; the raw socket has
the same bytes to move, and like the wire puts them into memory taken for them, on both ends. The two are
taken in alternation, and medians are compared.
"""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from ddiloco.arrays.host_memory import aligned_empty
from ddiloco.outer.codecs import ArrayFormat
from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report, RoundId
from ddiloco.remote.learner.client import ShardBook, SyncerClient
from ddiloco.remote.syncer.listening import Listening
from ddiloco.remote.syncer.server import SyncerPort, SyncerServer
from ddiloco.remote.wire.compatibility import Terms
from ddiloco.remote.wire.security import Security
from ddiloco.settings.remote import RemoteConfig
from ddiloco.training import platform
from ddiloco.workers.exchange import CheckpointWritten, EventDelivery
from ddiloco.workers.links import LearnerLink
from ddiloco.workers.transfer import Offer
from experiments.bench.measuring import TIMEOUT, another_process, medians, receive_from, row

CONFIG = RemoteConfig(gather=TIMEOUT)


def run(quick: bool = False) -> list[dict]:
    """A row for a fragment of 64 MiB (quick: 1 MiB), in GB/s, the bytes of both ways counted.

    `limit` is one copy in memory, the fastest that anything could be that has to leave a process.
    """
    size, repetitions = (1 << 20, 3) if quick else (64 << 20, 21)
    with another_process(_syncer, size) as pipe:
        wire_address, raw_address = receive_from(pipe)
        end = _LearnerEnd(wire_address, _terms(size))
        rng = np.random.default_rng(0)
        arrays = tuple(rng.standard_normal(part.shape, np.float32) for part in _formats(size))
        raw = socket.create_connection(raw_address)
        sent = rng.integers(0, 255, size, dtype=np.uint8)
        steps = iter(range(1, 10**6))

        def over_the_socket() -> None:
            raw.sendall(sent)
            receive(raw, size)

        with contextlib.closing(raw), contextlib.closing(end):
            both = {"wire": lambda: end.round_trip(next(steps), arrays), "raw": over_the_socket}
            seconds = medians(both, repetitions)
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    copy = medians({"copy": lambda: np.copyto(target, source)}, 9, warm_up=0)["copy"]
    speed = {kind: 2 * size / taken / 1e9 for kind, taken in seconds.items()}
    return [row("wire", speed["wire"], speed["raw"], size / copy / 1e9, "GB/s")]


class _LearnerEnd:
    """A learner's end of the wire, with no training behind it; joins at once."""

    def __init__(self, address: str, terms: Terms) -> None:
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._client = SyncerClient(ShardBook(address), 0, 0, 1, terms, Security(), CONFIG)
        self._client.attach(self._inbox)
        self._client.start()
        self._client.outbox.send(events.LearnerJoined(0, 1))
        self._receive(events.Welcomed)

    def round_trip(self, step: int, arrays: tuple[np.ndarray, ...]) -> None:
        """Reports a step of ten tokens, offers it as it is asked, and has the update of it."""
        report = Report(0, 1, step, (FragmentCounters(0, 1, 10),))
        self._client.outbox.send(events.StepReported(report))
        asked = self._receive(events.OfferAsked)
        self._client.send(asked.round, Contribution(0, 1, 0, 0, step, 1, 10), Offer(arrays))
        assert self._receive(events.UpdateArrived).version == step

    def close(self) -> None:
        """Leaves."""
        self._client.finish(1.0)

    def _receive(self, kind: type) -> Any:
        event = self._inbox.get(timeout=TIMEOUT).event
        assert isinstance(event, kind), event
        return event


def _formats(size: int) -> tuple[ArrayFormat, ...]:
    """A fragment as models have them: a few matrices and a vector; `size` bytes in all."""
    floats = size // 4
    shapes = ((floats // 2048, 1024), (floats // 4,), (floats // 4 - 256,), (256,))
    return tuple(ArrayFormat(shape, np.dtype(np.float32)) for shape in shapes)


def _terms(size: int) -> Terms:
    return Terms("bench", "bench", 1, 1, *[[_formats(size)]] * 3, TIMEOUT)


def receive(connection: socket.socket, size: int) -> memoryview:
    """So many bytes, in memory taken for them."""
    received = left = memoryview(aligned_empty((size,), np.uint8))
    while left:
        count = connection.recv_into(left)
        if not count:
            raise ConnectionError("the other end is closed")
        left = left[count:]
    return received


def _syncer(pipe: Connection, size: int) -> None:
    """The other process: a question after each report, an update after each offer, an echo on the socket."""
    platform.prepare(cache=False)
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    links = []

    class Port(SyncerPort):
        def connect(self, learner: int, incarnation: int, link: LearnerLink) -> None:
            links.append(link)

        def send(self, event: events.SyncerEvent | CheckpointWritten) -> None:
            inbox.put(event)

        def take_offer(self, event: events.FragmentArrived, arrays: Sequence[np.ndarray]) -> None:
            inbox.put(arrays)

    terms = _terms(size)
    listening = Listening("127.0.0.1:0", Security(), CONFIG, terms.max_learners)
    server = SyncerServer(terms, Security(), listening, Port(), lambda record: None)
    port = server.start()
    server.open()
    beside = socket.create_server(("127.0.0.1", 0))
    pipe.send((f"127.0.0.1:{port}", beside.getsockname()))
    assert isinstance(inbox.get(timeout=TIMEOUT), events.LearnerJoined)
    zeros = [np.zeros(part.shape, part.dtype) for part in _formats(size)]
    links[0].deliver(EventDelivery(events.Welcomed(1, 0, (0,), (0,)), [zeros]))
    raw, _ = beside.accept()
    while isinstance(event := inbox.get(timeout=TIMEOUT), events.StepReported):
        step = event.report.step
        links[0].deliver(EventDelivery(events.OfferAsked(RoundId(step, 0), 0, step)))
        arrays = inbox.get(timeout=TIMEOUT)
        links[0].deliver(EventDelivery(events.UpdateArrived(0, step, step), [arrays]))
        raw.sendall(receive(raw, size))
