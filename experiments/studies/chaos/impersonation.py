"""A peer with a learner's credentials that reports as a learner does, and sends arbitrary offers."""

from __future__ import annotations

import abc
import contextlib
import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc
import numpy as np

from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report, RoundId
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.compatibility import Terms
from ddiloco.remote.wire.event_messages import from_learner, syncer_event, up_header
from ddiloco.remote.wire.payload import chunks, payload_bytes, receive
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.validation import WireError

Arrays = tuple[np.ndarray, ...]
Count = Callable[[str], None]

_AHEAD = 2  # steps beyond the newest update that it claims, so that it is asked for offers


def _noise(rng: random.Random, arrays: Arrays, length: float) -> Arrays:
    from_seed = np.random.default_rng(rng.getrandbits(32))
    return tuple((a + length * from_seed.standard_normal(a.shape)).astype(a.dtype) for a in arrays)


def _away(factor: float) -> Callable[[random.Random, Arrays, Arrays], Arrays]:
    """The way that the model last went, times the factor, from where it is."""
    return lambda rng, last, now: tuple(
        (n + factor * (n - b)).astype(n.dtype) for b, n in zip(last, now, strict=True)
    )


def silence(end: threading.Event, seconds: float = 10.0) -> Iterator[bytes]:
    """No message, until `end` or for so long."""
    end.wait(seconds)
    yield from ()


POISONS: dict[str, Callable[[random.Random, Arrays, Arrays], Arrays]] = {  # of a version and the one before
    "back the way the model came": _away(-1.0),
    "back, 100 times": _away(-100.0),
    "on, 1e6 times": _away(1e6),
    "noise": lambda rng, last, now: _noise(rng, now, 0.02),
    "long noise": lambda rng, last, now: _noise(rng, now, 1e6),
    "an old version": lambda rng, last, now: last,
    "not finite": lambda rng, last, now: (np.full_like(now[0], np.nan), *now[1:]),
    "infinite": lambda rng, last, now: tuple(np.full_like(a, np.inf) for a in now),
    "zeros": lambda rng, last, now: tuple(np.zeros_like(a) for a in now),
}
CLAIMS: dict[str, dict[str, int]] = {  # of an offer, beside those that would be sound
    "honest counts": {},
    "more tokens than there are": {"tokens": 1 << 52},
    "steps without end": {"steps": 1 << 50, "step": 1 << 51},
    "another fragment": {"fragment": 99},
    "an older version": {"version": 0},
    "no work": {"steps": 0, "tokens": 0},
    "a number beyond all": {"tokens": 1 << 60},
    "another history": {"lineage": 1 << 40},
    "another size": {"size": 1 << 50},
}
BROKEN: dict[str, Callable[[bytes, list[bytes]], Iterable[bytes]]] = {  # messages, of a header and chunks
    "cut short": lambda header, body: [header, b"only this"],
    "too long": lambda header, body: [header, *body, b"x"],
    "a chunk too long": lambda header, body: [header, b"".join(body) + b"x"],
    "an empty chunk": lambda header, body: [header, b"", *body],
    "without end": lambda header, body: itertools.chain([header], itertools.repeat(b"x")),
    "garbage": lambda header, body: [b"\xff\xff\xff"],
    "nothing": lambda header, body: [],
    "silence": lambda header, body: itertools.chain([header], silence(threading.Event(), 600.0)),
}


class Impersonator(abc.ABC):
    """Connects under its number for as long as it lives. Subclasses define how it answers a request."""

    def __init__(
        self, address: str, terms: Terms, learner: int, security: Security, tokens: int, count: Count
    ) -> None:
        """`tokens`: of a step. `count` is called with each attempt, and how its call ended."""
        self._address, self._terms, self._learner, self._security = address, terms, learner, security
        self._tokens, self._count = tokens, count
        self._rng = random.Random(learner)
        self._incarnation = time.time_ns() // 1000
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel: grpc.Channel | None = None
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._peers_token = ""
        self._pieces: dict[int, Arrays] = {}
        self._before: dict[int, Arrays] = {}
        self._known: dict[int, tuple[int, int, int]] = {}  # by fragment: version, step, lineage
        self.over = False  # by the syncer

    def run(self, stop: threading.Event) -> None:
        """Connects again and again until `stop`, or until the syncer says that the run is over."""
        while not (stop.is_set() or self.over):
            with self._counted("a connection"):
                self._connect()
            stop.wait(0.5)

    def leave(self) -> None:
        """Ends its connection, and makes no other."""
        self.over = True
        if self._channel is not None:
            self._channel.close()

    @abc.abstractmethod
    def _answer(self, which: RoundId) -> None:
        """Offers something to a round that asks for it."""

    @contextlib.contextmanager
    def _counted(self, deed: str) -> Iterator[None]:
        try:
            yield
            self._count(f"{deed}: ended")
        except grpc.RpcError as error:
            self._count(f"{deed}: {error.code().name}")
        except (AttributeError, ValueError, StopIteration, KeyError, WireError) as error:
            # No channel, a closed one, or too early.
            self._count(f"{deed}: {type(error).__name__}")

    def _hello(self, **fields: Any) -> bytes:
        known = {"version": wire.VERSION, "fingerprint": self._terms.fingerprint, "rules": self._terms.rules}
        known |= {"learner": self._learner, "process": self._incarnation}
        return pb.FromLearner(hello=pb.Hello(**{**known, **fields})).SerializeToString()

    def _send_event(self, event: Any) -> None:
        self._outgoing.put(from_learner(event).SerializeToString())

    def _send_message(self, **kind: Any) -> None:
        self._outgoing.put(pb.FromLearner(**kind).SerializeToString())

    def _connect(self) -> None:
        sent = self._outgoing = queue.SimpleQueue()
        with self._security.channel(self._address, wire.options(5.0)) as channel:
            control = channel.stream_stream(wire.CONTROL)(
                iter(sent.get, None), metadata=self._security.metadata
            )
            try:
                sent.put(self._hello())
                accepted = pb.ToLearner.FromString(next(control)).accepted
                self._peers_token = accepted.peers_token
                self._metadata = (*self._security.metadata, (wire.SESSION_KEY, accepted.session))
                self._channel = channel
                threading.Thread(target=self._take_updates, args=(channel,), daemon=True).start()
                self._incarnation = max(self._incarnation, accepted.newest_incarnation) + 1
                self._send_event(events.LearnerJoined(self._learner, self._incarnation))
                for data in control:
                    message = pb.ToLearner.FromString(data)
                    if message.WhichOneof("kind") == "leave":
                        self.over = True
                        return
                    if message.event.WhichOneof("kind") == "offer_asked":
                        self._answer(syncer_event(message).round)
                        self._report()
            finally:
                self._channel = None
                sent.put(None)
                control.cancel()

    def _take_updates(self, channel: grpc.Channel) -> None:
        with contextlib.suppress(grpc.RpcError, ValueError, WireError):
            stream = channel.unary_stream(wire.UPDATES)(b"", metadata=self._metadata)
            for data in stream:
                header = pb.DownHeader.FromString(data)
                p = header.update.fragment
                pieces = receive(self._terms.down[p], header.size, stream)
                self._before[p] = self._pieces.get(p, pieces)
                self._pieces[p] = pieces
                step = max(header.step, header.update.step)
                self._known[p] = header.update.version, step, header.update.lineage
                self._report()

    def _report(self, **claims: int) -> None:
        """A claim of two steps on its versions, or of these steps and tokens."""
        if len(self._known) < self._terms.num_fragments:
            return
        steps = claims.get("steps", _AHEAD)
        rows = [self._known[p] for p in range(self._terms.num_fragments)]
        counters = tuple(FragmentCounters(version, steps, steps * self._tokens) for version, *_ in rows)
        step = claims.get("step", max(step for _, step, _ in rows) + _AHEAD)
        self._send_event(events.StepReported(Report(self._learner, self._incarnation, step, counters, True)))

    def _offer(
        self,
        which: RoundId,
        poison: str | None = None,
        claim: str = "honest counts",
        broken: str | None = None,
    ) -> Iterable[bytes]:
        """The messages of an offer: of work that changed nothing, with what is to be wrong with it."""
        p = which.fragment
        version, step, lineage = self._known[p]
        work = (step + _AHEAD, _AHEAD, _AHEAD * self._tokens, lineage)
        sound = Contribution(self._learner, self._incarnation, p, version, *work)
        arrays = self._pieces[p]
        if poison is not None:
            arrays = POISONS[poison](self._rng, self._before[p], arrays)
        header = up_header(which, sound, payload_bytes(arrays))
        for name, value in CLAIMS[claim].items():
            setattr(header if name == "size" else header.contribution, name, value)
        messages = BROKEN[broken] if broken is not None else lambda header, body: [header, *body]
        return messages(header.SerializeToString(), [*chunks(arrays)])

    def _push(self, deed: str, messages: Iterable[bytes]) -> None:
        """Has the syncer end the call, however long that takes."""
        with self._counted(deed):
            self._channel.stream_unary(wire.OFFERS)(iter(messages), metadata=self._metadata)
