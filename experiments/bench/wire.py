"""How fast fragments travel: round trips over the wire against the same bytes over a raw socket.

A round trip is what a synchronisation moves for one learner: the learner's report, the syncer's pull, the
fragment up, the fragment down. Both ends are processes of their own on the loopback; the raw socket has the
same bytes to move, and like the wire puts them into memory taken for them, on both ends. The two are taken
in alternation, and medians are compared.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np

from ddiloco.outer.codecs import ArrayFormat
from ddiloco.outer.host_memory import aligned_empty
from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report
from ddiloco.remote.learner.client import SyncerClient
from ddiloco.remote.syncer.server import SyncerServer
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.terms import Terms
from ddiloco.roles.delivery import Told
from ddiloco.roles.shelf import Shelf
from ddiloco.roles.transfer import Offer
from ddiloco.settings.remote import RemoteConfig
from ddiloco.training import platform
from experiments.bench.row import row

PATIENCE = 60.0
CONFIG = RemoteConfig()


def run(quick: bool = False) -> list[dict]:
    """A row for a fragment of 64 MiB (quick: 1 MiB), in GB/s, the bytes of both ways counted."""
    size, repetitions = (1 << 20, 3) if quick else (64 << 20, 21)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_syncer, args=(theirs, size), daemon=True)
    child.start()
    wire_address, raw_address = ours.recv()
    raw, wire = _RawEnd(raw_address, size), _WireEnd(wire_address, size)
    seconds: dict[str, list[float]] = {"wire": [], "raw": []}
    for repetition in range(repetitions + 2):
        for kind, round_trip in (("wire", wire.round_trip), ("raw", raw.round_trip)):
            start = time.perf_counter()
            round_trip()
            if repetition >= 2:  # the first ones find neither memory nor windows
                seconds[kind].append(time.perf_counter() - start)
    wire.close()
    raw.close()
    child.join(PATIENCE)
    speed = {kind: 2 * size / statistics.median(taken) / 1e9 for kind, taken in seconds.items()}
    return [row("wire", speed["wire"], speed["raw"], _copy_speed(size), "GB/s")]


def _formats(size: int) -> tuple[ArrayFormat, ...]:
    """A fragment as models have them: a few matrices and a vector; `size` bytes in all."""
    floats = size // 4
    shapes = ((floats // 2048, 1024), (floats // 4,), (floats // 4 - 256,), (256,))
    return tuple(ArrayFormat(shape, np.dtype(np.float32)) for shape in shapes)


def _terms(size: int) -> Terms:
    return Terms("bench", "bench", 1, [_formats(size)], [_formats(size)], PATIENCE)


class _WireEnd:
    """A learner that has a fragment on its shelf."""

    def __init__(self, address: str, size: int):
        rng = np.random.default_rng(0)
        arrays = tuple(rng.standard_normal(part.shape, np.float32) for part in _formats(size))
        self.inbox, self.shelf = queue.SimpleQueue(), Shelf()
        self.shelf.put(Contribution(0, 1, 0, 0, 1, 1, 1), Offer(arrays))
        self._client = SyncerClient(address, 0, 1, _terms(size), Security(), CONFIG)
        self._client.attach(self)
        self._client.start()
        self._client.outbox.send(events.LearnerJoined(0, 1))
        assert isinstance(self.inbox.get(timeout=PATIENCE).event, events.Welcomed)
        self._step = 0

    def round_trip(self) -> None:
        self._step += 1
        report = Report(0, 1, self._step, (FragmentCounters(0, 1, 1),))
        self._client.outbox.send(events.StepReported(report))
        delivery = self.inbox.get(timeout=PATIENCE)
        assert delivery.event.version == self._step

    def close(self) -> None:
        self._client.finish(PATIENCE)


class _RawEnd:
    """The other end of a plain TCP connection."""

    def __init__(self, address: tuple[str, int], size: int):
        self._socket = socket.create_connection(address)
        self._size = size
        self._sent = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)

    def round_trip(self) -> None:
        self._socket.sendall(self._sent)
        _receive(self._socket, self._size)

    def close(self) -> None:
        self._socket.close()


def _receive(connection: socket.socket, size: int) -> memoryview | None:
    """So many bytes, in memory taken for them; None if the connection has ended."""
    received = left = memoryview(aligned_empty((size,), np.uint8))
    while left:
        count = connection.recv_into(left)
        if not count:
            return None
        left = left[count:]
    return received


def _syncer(pipe: Connection, size: int) -> None:
    """The other process: answers each report with a pull and an update, and echoes on the raw socket."""
    platform.prepare(cache=False)
    heard: queue.SimpleQueue = queue.SimpleQueue()
    links = []

    def connect(learner: int, incarnation: int, link) -> None:
        links.append(link)

    server = SyncerServer(_terms(size), Security(), CONFIG, connect, heard.put, lambda record: None)
    port = server.start("127.0.0.1:0")
    server.open()
    listening = socket.create_server(("127.0.0.1", 0))
    pipe.send((f"127.0.0.1:{port}", listening.getsockname()))
    raw, _ = listening.accept()
    assert isinstance(heard.get(timeout=PATIENCE), events.LearnerJoined)
    zeros = [np.zeros(part.shape, part.dtype) for part in _formats(size)]
    links[0].deliver(Told(events.Welcomed(1, 0, (0,), (0,)), [zeros]))
    while isinstance(event := heard.get(timeout=PATIENCE), events.StepReported):
        _, arrays = links[0].pull(0)
        step = event.report.step
        links[0].deliver(Told(events.UpdateArrived(0, step, step), [arrays]))
        raw.sendall(_receive(raw, size))
    server.stop(1.0)
    os._exit(0)  # whatever gRPC's threads still do


def _copy_speed(size: int) -> float:
    """GB/s of one copy in memory, the fastest that anything could be that has to leave a process."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    taken = []
    for _ in range(9):
        start = time.perf_counter()
        np.copyto(target, source)
        taken.append(time.perf_counter() - start)
    return size / statistics.median(taken) / 1e9
