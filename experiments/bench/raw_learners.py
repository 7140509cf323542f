"""Learners of `bench fanin`: the protocol's cores over plain HTTP/2 frames, which cost little beside gRPC."""

from __future__ import annotations

import collections
import heapq
import random
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

import numpy as np

from ddiloco.arrays.blocks import Cut
from ddiloco.protocol import actions, events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import Report
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.remote.learner.streams import Collector
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.blocks import cut_message
from ddiloco.remote.wire.compatibility import Terms
from ddiloco.remote.wire.event_messages import from_learner, syncer_event, up_header, update_of
from ddiloco.workers.exchange import EventDelivery
from experiments.bench.measuring import TIMEOUT

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8  # kinds of frames
END_STREAM, ACK, END_HEADERS = 1, 1, 4  # flags
_INITIAL_WINDOW = 4  # a setting
_LARGEST = (1 << 31) - 1
TOKENS = 1  # of a step, as learners claim


class RawConnection:
    """One client's HTTP/2 connection; nothing in it waits."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self._next, self._received = 1, bytearray()
        self._takers: dict[int, Callable[[bytes], None]] = {}
        self._parts: dict[int, bytearray] = {}
        self._window, self._initial = 65535, 65535
        self._windows: dict[int, int] = {}
        self._waiting: collections.deque[tuple[int, bytes, int]] = collections.deque()
        self._out = bytearray(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._frame(SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW, _LARGEST))
        self._frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", _LARGEST - 65535))

    def call(
        self, path: str, metadata: Sequence[tuple[str, str]], take: Callable[[bytes], None] | None = None
    ) -> int:
        """Begins a call; returns its stream. `take` gets each message that comes."""
        stream, self._next = self._next, self._next + 2
        fixed = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "syncer")]
        fixed += [("te", "trailers"), ("content-type", "application/grpc")]
        self._frame(HEADERS, END_HEADERS, stream, b"".join(_header(*one) for one in [*fixed, *metadata]))
        self._windows[stream] = self._initial
        if take is not None:
            self._takers[stream], self._parts[stream] = take, bytearray()
        return stream

    def send(self, stream: int, message: bytes, last: bool = False) -> None:
        """Sends a message; `last` ends this side of the call."""
        data = b"\0" + struct.pack(">I", len(message)) + message
        for first in range(0, len(data), 16384):
            part = data[first : first + 16384]
            self._waiting.append((stream, part, END_STREAM if last and first + 16384 >= len(data) else 0))

    def flush(self) -> None:
        """Hands the system what it takes."""
        while self._waiting:
            stream, data, flags = self._waiting[0]
            if min(self._window, self._windows.get(stream, _LARGEST)) < len(data):
                break
            self._waiting.popleft()
            self._window -= len(data)
            if flags:
                self._windows.pop(stream, None)
            elif stream in self._windows:
                self._windows[stream] -= len(data)
            self._frame(DATA, flags, stream, data)
        while self._out:
            try:
                del self._out[: self.socket.send(self._out)]
            except BlockingIOError:
                return

    def receive(self) -> None:
        """Takes what has come."""
        try:
            while data := self.socket.recv(1 << 18):
                self._received += data
                if len(data) < 1 << 18:
                    break
            else:
                raise ConnectionError("the server has closed the connection")
        except BlockingIOError:
            pass
        at, received = 0, self._received
        while len(received) - at >= 9:
            length = int.from_bytes(received[at : at + 3])
            if len(received) - at < 9 + length:
                break
            kind, flags, stream = (
                received[at + 3],
                received[at + 4],
                int.from_bytes(received[at + 5 : at + 9]),
            )
            self._take(kind, flags, stream, bytes(received[at + 9 : at + 9 + length]))
            at += 9 + length
        del received[:at]
        self.flush()

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == DATA and stream in self._takers:
            parts = self._parts[stream]
            parts += body
            while len(parts) >= 5 and len(parts) >= (end := 5 + int.from_bytes(parts[1:5])):
                message = bytes(parts[5:end])
                del parts[:end]
                self._takers[stream](message)
        elif kind == SETTINGS and not flags & ACK:
            for setting, value in struct.iter_unpack(">HI", body):
                if setting == _INITIAL_WINDOW:
                    self._windows = {s: w + value - self._initial for s, w in self._windows.items()}
                    self._initial = value
            self._frame(SETTINGS, ACK, 0, b"")
        elif kind == PING and not flags & ACK:
            self._frame(PING, ACK, 0, body)
        elif kind == WINDOW_UPDATE:
            if not stream:
                self._window += int.from_bytes(body)
            elif stream in self._windows:
                self._windows[stream] += int.from_bytes(body)
        elif kind == GOAWAY or (kind == RST_STREAM and stream in self._takers and any(body)):
            raise ConnectionError(f"the server has ended stream {stream}: {body!r}")
        if stream in self._takers and (
            kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM)
        ):
            del self._takers[stream], self._parts[stream]

    def _frame(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        self._out += len(body).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + body


def _header(name: str, value: str) -> bytes:
    """A header of HPACK, literal and not indexed."""
    return b"\0" + b"".join(_length(len(text)) + text.encode() for text in (name, value))


def _length(number: int) -> bytes:
    if number < 127:
        return bytes([number])
    out, number = bytearray([127]), number - 127
    while number >= 128:
        out.append(number % 128 + 128)
        number //= 128
    return bytes([*out, number])


class RawLearner:
    """A learner's core, whose steps take no time, and the connections of its hosts."""

    def __init__(
        self, learner: int, address: tuple[str, int], hosts: int, terms: Terms, policy: SyncPolicy, steps: int
    ) -> None:
        self.core = LearnerCore(learner, 1, policy, steps)
        self.hosts = [RawConnection(address)]  # others once the session is there: a silent one is closed
        self.updates = 0
        self._terms, self._address, self._num_hosts = terms, address, hosts
        self._before: Report | None = None
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._collector = Collector(range(terms.num_fragments), self._deliver)
        self._cuts = [[_cut(form.shape, host, hosts) for host in range(hosts)] for form in terms.offers(0)[0]]
        self._payloads = [
            b"".join(
                np.full(cuts[host].size, 0.5, form.dtype).tobytes()
                for cuts, form in zip(self._cuts, terms.offers(0)[0], strict=True)
            )
            for host in range(hosts)
        ]
        self._control = self.hosts[0].call(wire.CONTROL, (), self._told)
        hello = pb.Hello(
            version=wire.VERSION,
            fingerprint=terms.fingerprint,
            rules=terms.rules,
            learner=learner,
            process=1,
            hosts=hosts,
            shards=terms.shards,
        )
        self.hosts[0].send(self._control, pb.FromLearner(hello=hello).SerializeToString())
        self.hosts[0].flush()

    @property
    def ready(self) -> bool:
        """Whether it has joined."""
        return self.core.recovered

    def step(self) -> bool:
        """Takes a step, or repeats its report; whether it stepped."""
        core = self.core
        stepped = core.recovered and not core.blocked and not core.done
        if stepped:
            self._handle(events.StepStarted(TOKENS))
            self._handle(events.StepFinished())
        elif self._metadata:
            self._handle(events.Heartbeat())
        for host in self.hosts:
            host.flush()
        return stepped

    def _told(self, data: bytes) -> None:
        message = pb.ToLearner.FromString(data)
        if message.HasField("accepted"):
            self._metadata = ((wire.SESSION_KEY, message.accepted.session),)
            self.hosts += [RawConnection(self._address) for _ in range(self._num_hosts - 1)]
            for number, host in enumerate(self.hosts):
                named = (*self._metadata, (wire.HOST_KEY, str(number)))
                stream = host.call(wire.UPDATES, named, _Updates(self, number).take)
                host.send(stream, self._wanted(number), last=True)
                host.flush()
            self._handle(events.Heartbeat())
        elif message.HasField("event"):
            self._handle(syncer_event(message))

    def _wanted(self, host: int) -> bytes:
        if self._num_hosts == 1:
            return b""
        cuts = [cut_message(cuts[host]) for cuts in self._cuts] * self._terms.num_fragments
        return pb.Wanted(arrays=cuts).SerializeToString()

    def received(self, header: pb.DownHeader, host: int) -> None:
        """A host has a fragment of a welcome or an update; the learner goes by its first host."""
        self.updates += not header.welcome and not host
        if not host:
            self._collector.take(header, update_of(header, self._terms.num_fragments), ())

    def _deliver(self, delivery: EventDelivery) -> None:
        self._handle(delivery.event)

    def _handle(self, event: events.LearnerEvent) -> None:
        for action in self.core.handle(event, time.monotonic()):
            match action:
                case actions.SendToSyncer(sent):
                    message = from_learner(sent, self._before)
                    self._before = sent.report if isinstance(sent, events.StepReported) else self._before
                    self.hosts[0].send(self._control, message.SerializeToString())
                case actions.SendOffer(which, contribution):
                    for number, host in enumerate(self.hosts):
                        payload = self._payloads[number]
                        header = up_header(which, contribution, len(payload))
                        if len(self.hosts) > 1:
                            header.arrays.extend(cut_message(cuts[number]) for cuts in self._cuts)
                        stream = host.call(wire.OFFERS, (*self._metadata, (wire.HOST_KEY, str(number))))
                        host.send(stream, header.SerializeToString())
                        host.send(stream, payload, last=True)
                case actions.EndProcess(reason):
                    raise RuntimeError(reason)


class _Updates:
    """The stream of updates to a host: headers, each before its chunks."""

    def __init__(self, learner: RawLearner, host: int) -> None:
        self._learner, self._host = learner, host
        self._header: pb.DownHeader | None = None
        self._left = 0

    def take(self, data: bytes) -> None:
        if self._header is None:
            self._header = pb.DownHeader.FromString(data)
            self._left = self._header.size
        else:
            self._left -= len(data)
        if not self._left:
            header, self._header = self._header, None
            self._learner.received(header, self._host)


def _cut(shape: tuple[int, ...], host: int, hosts: int) -> Cut:
    """A host's share of an array, cut along the last axis."""
    width = shape[-1]
    ends = (host * width // hosts, (host + 1) * width // hosts)
    return Cut(shape, ((*((0, n) for n in shape[:-1]), ends),))


class RawEcho:
    """The messages of a learner's hosts, but to a server that sends back what it gets."""

    def __init__(self, address: tuple[str, int], sizes: Sequence[int], hosts: int) -> None:
        """`sizes`: bytes of a report, and of a host's offer: header and payload."""
        self.hosts = [RawConnection(address) for _ in range(hosts)]
        self.updates, self.ready = 0, True
        self._report, *self._offer = (bytes(size) for size in sizes)
        self._control = self.hosts[0].call("/echo", (), lambda data: None)

    def step(self) -> bool:
        """Sends what a learner sends for a step."""
        self.hosts[0].send(self._control, self._report)
        for host in self.hosts:
            stream = host.call("/echo", (), self._took)
            host.send(stream, self._offer[0])
            host.send(stream, self._offer[1], last=True)
            host.flush()
        return True

    def _took(self, data: bytes) -> None:
        self.updates += len(data) == len(self._offer[1])


def play(
    pipe: Connection,
    learners: Sequence[RawLearner | RawEcho],
    interval: float,
    warm_up: float,
    seconds: float,
) -> tuple[int, int, float]:
    """Steps each learner every `interval` seconds, once all have joined.

    Sends "connected", then "warm" and "over" at the ends of what is measured.

    Returns steps and updates meanwhile, and by how many seconds a step began too late at most.
    """
    selector, known = selectors.DefaultSelector(), set()
    begun = time.monotonic()
    while not known or not all(learner.ready for learner in learners):
        if time.monotonic() > begun + TIMEOUT:
            raise TimeoutError("not all learners have joined")
        new = {host for learner in learners for host in learner.hosts} - known
        for connection in new:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
        known |= new
        for key, _ in selector.select(1.0):
            key.data.receive()
    pipe.send("connected")
    rng, begun = random.Random(0), time.monotonic()
    due = [(begun + interval * rng.random(), number) for number in range(len(learners))]
    heapq.heapify(due)
    steps, late, before, measuring = 0, 0.0, 0, False
    for now in _ticks(selector, due):
        if not measuring and now > begun + warm_up:
            measuring, steps, late, before = True, 0, 0.0, sum(learner.updates for learner in learners)
            pipe.send("warm")
        if now > begun + warm_up + seconds:
            break
        while due[0][0] <= now:
            at, number = due[0]
            heapq.heapreplace(due, (max(at + interval, now), number))
            late = max(late, now - at)
            steps += learners[number].step()
    pipe.send("over")
    return steps, sum(learner.updates for learner in learners) - before, late


def _ticks(selector: selectors.BaseSelector, due: list[tuple[float, int]]) -> Iterator[float]:
    """The time, again and again, after what has come meanwhile."""
    while True:
        for key, _ in selector.select(max(0.0, due[0][0] - time.monotonic())):
            key.data.receive()
        yield time.monotonic()
