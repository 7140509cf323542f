"""A peer with a learner's credentials that means no good: what it offers, claims and asks is never sound."""

from __future__ import annotations

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
from ddiloco.remote.wire import agreement as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.agreement import WireError
from ddiloco.remote.wire.event_messages import from_learner, syncer_event, up_header
from ddiloco.remote.wire.payload import chunks, payload_bytes, receive
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.terms import Terms
from experiments.studies.chaos.lying_donor import LyingDonor

Arrays = tuple[np.ndarray, ...]
Count = Callable[[str], None]

IDLE = 20  # calls of a kind that say nothing, at a time
_AHEAD = 2  # steps beyond the newest update that it claims, so that it is asked for offers
_ESCAPES = "\x1b[2J\x1b[31m\r\n" * 9


def _noise(rng: random.Random, arrays: Arrays, length: float) -> Arrays:
    from_seed = np.random.default_rng(rng.getrandbits(32))
    return tuple((a + length * from_seed.standard_normal(a.shape)).astype(a.dtype) for a in arrays)


def _away(factor: float) -> Callable[[random.Random, Arrays, Arrays], Arrays]:
    """The way that the model last went, times the factor, from where it is."""
    return lambda rng, last, now: tuple(
        (n + factor * (n - b)).astype(n.dtype) for b, n in zip(last, now, strict=True)
    )


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
    "another fragment": {"fragment": 1},
    "an older version": {"version": 0},
    "no work": {"steps": 0, "tokens": 0},
    "a number beyond all": {"tokens": 1 << 60},
    "another history": {"lineage": 1 << 40},
}


class Liar:
    """Connects under its number for as long as it lives; each connection lies until it is ended."""

    def __init__(
        self,
        address: str,
        terms: Terms,
        learner: int,
        security: Security,
        last_step: int,
        tokens: int,
        count: Count,
    ) -> None:
        """`tokens`: of a step. `count` hears of each deed, and of how its call ended."""
        self._address, self._terms, self._learner, self._security = address, terms, learner, security
        self._last_step, self._tokens, self._count = last_step, tokens, count
        self._rng = random.Random(learner)
        self._incarnation = time.time_ns() // 1000
        self._said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel: grpc.Channel | None = None
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._peers_token = ""
        self._pieces: dict[int, Arrays] = {}
        self._before: dict[int, Arrays] = {}
        self._known: dict[int, tuple[int, int, int]] = {}  # by fragment: version, step, lineage
        self._deeds = [self._rejoin, self._claim, self._snapshots, self._records, self._events]
        self._deeds += [self._idle, self._others, self._donors, self._unasked, self._garbage]
        self._donor = LyingDonor(count)
        self.over = False  # the syncer has said so

    def live(self, stop: threading.Event) -> None:
        """Lies until `stop`, or until the syncer says that the run is over."""
        threading.Thread(target=self._do_deeds, args=(stop,), daemon=True).start()
        while not (stop.is_set() or self.over):
            with self._counted("a connection"):
                self._connect()
            stop.wait(0.5)

    @contextlib.contextmanager
    def _counted(self, deed: str) -> Iterator[None]:
        try:
            yield
            self._count(f"{deed}: ended")
        except grpc.RpcError as error:
            self._count(f"{deed}: {error.code().name}")
        except (ValueError, StopIteration, KeyError, WireError) as error:  # a closed channel, or too early
            self._count(f"{deed}: {type(error).__name__}")

    def _hello(self, **fields: Any) -> bytes:
        said = {"version": wire.VERSION, "fingerprint": self._terms.fingerprint, "rules": self._terms.rules}
        said |= {"learner": self._learner, "process": self._incarnation, "donor_port": self._donor.port}
        return pb.FromLearner(hello=pb.Hello(**{**said, **fields})).SerializeToString()

    def _tell(self, event: Any) -> None:
        self._said.put(from_learner(event).SerializeToString())

    def _say(self, **kind: Any) -> None:
        self._said.put(pb.FromLearner(**kind).SerializeToString())

    def _connect(self) -> None:
        said = self._said = queue.SimpleQueue()
        with self._security.channel(self._address, wire.options(5.0)) as channel:
            control = channel.stream_stream(wire.CONTROL)(
                iter(said.get, None), metadata=self._security.metadata
            )
            try:
                said.put(self._hello())
                accepted = pb.ToLearner.FromString(next(control)).accepted
                self._peers_token = accepted.peers_token
                self._metadata = (*self._security.metadata, (wire.SESSION_KEY, accepted.session))
                self._channel = channel
                threading.Thread(target=self._take_updates, args=(channel,), daemon=True).start()
                self._incarnation = max(self._incarnation, accepted.newest_incarnation) + 1
                self._tell(events.LearnerJoined(self._learner, self._incarnation))
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
                said.put(None)
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
        """A claim of two steps on what it holds, or of these steps and tokens."""
        if len(self._known) < self._terms.num_fragments:
            return
        steps = claims.get("steps", _AHEAD)
        rows = [self._known[p] for p in range(self._terms.num_fragments)]
        counters = tuple(FragmentCounters(version, steps, steps * self._tokens) for version, *_ in rows)
        step = claims.get("step", max(step for _, step, _ in rows) + _AHEAD)
        self._tell(events.StepReported(Report(self._learner, self._incarnation, step, counters, True)))

    def _answer(self, which: RoundId) -> None:
        """One of the poisons under one of the claims, for a round that asks for it."""
        poison, claim = self._rng.choice(list(POISONS)), self._rng.choice([*["honest counts"] * 9, *CLAIMS])
        p = which.fragment
        version, step, lineage = self._known[p]
        work = (step + _AHEAD, _AHEAD, _AHEAD * self._tokens, lineage)
        sound = Contribution(self._learner, self._incarnation, p, version, *work)
        arrays = POISONS[poison](self._rng, self._before[p], self._pieces[p])
        header = up_header(which, sound, payload_bytes(arrays))
        for name, value in CLAIMS[claim].items():
            setattr(header.contribution, name, value)
        body = [*chunks(arrays)]
        broken = {"cut short": body[:-1], "too long": [*body, b"x"], "an empty chunk": [b"", *body]}
        how = self._rng.choice([None] * 9 + list(broken))
        named = how or (claim if CLAIMS[claim] else poison)
        self._push(f"an offer, {named}", header, broken.get(how, body))

    def _push(self, deed: str, header: pb.UpHeader, body: Iterable[bytes]) -> None:
        with self._counted(deed):
            send = self._channel.stream_unary(wire.OFFERS)
            messages = itertools.chain([header.SerializeToString()], body)
            send(messages, metadata=self._metadata, timeout=self._terms.offer_timeout)

    def _do_deeds(self, stop: threading.Event) -> None:
        while not stop.wait(self._rng.uniform(0.1, 0.5)) and not self.over:
            if self._channel is not None:
                deed = self._rng.choice(self._deeds)
                with self._counted(deed.__name__.strip("_")):
                    deed()

    # What it does beside answering.

    def _rejoin(self) -> None:
        for _ in range(self._rng.choice((1, 5, 200))):
            self._incarnation += self._rng.choice((1, 1000))
            self._tell(events.LearnerJoined(self._learner, self._incarnation))

    def _claim(self) -> None:
        claims = ({"step": self._last_step}, {"step": 1 << 52}, {"steps": 1 << 50}, {"step": 0, "steps": 0})
        self._report(**self._rng.choice(claims))

    def _snapshots(self) -> None:
        versions = [1 << 52] * self._terms.num_fragments
        number = self._rng.choice((0, 1, 1 << 52))
        self._say(
            state_recorded={"snapshot": number, "incarnation": 7, "recorded": True, "versions": versions}
        )
        self._say(part_written={"snapshot": number, "problem": _ESCAPES})

    def _records(self) -> None:
        told = [
            pb.Record(alarm={"sentence": f"{self._rng.random()}{_ESCAPES}" * 9, "time": 1e300}),
            pb.Record(step_done={"step": 1 << 52, "time": -1e300, "metrics": {"loss": float("nan")}}),
            pb.Record(noted={"name": f"{self._rng.random()}{_ESCAPES}", "json": "[" * 2000, "time": 0.0}),
            pb.Record(learner_died={"time": time.time(), "traceback": "x" * 40_000}),
        ]
        position = "x" * self._rng.choice((0, 10, 100_000))
        records = {"first": self._rng.getrandbits(20), "records": self._rng.sample(told, 2)}
        self._say(records=pb.Records(**records, position=position))

    def _events(self) -> None:
        self._tell(events.OfferFailed(RoundId(1, 0), 0, self._incarnation, _ESCAPES))
        self._tell(events.LearnerReady(0, self._incarnation, 1 << 50, (1 << 50,) * self._terms.num_fragments))
        self._tell(events.LearnerLost(0, self._incarnation, _ESCAPES))

    def _idle(self) -> None:
        """Calls of every kind that never say anything, for a while."""
        never = threading.Event()
        calls = [
            self._channel.stream_stream(kind)(_silence(never), metadata=self._metadata, timeout=3.0)
            for kind in (wire.UPDATES, wire.PEERS, wire.OFFERS, wire.CONTROL)
            for _ in range(IDLE)
        ]
        never.wait(2.0)
        never.set()
        for call in calls:
            call.cancel()

    def _others(self) -> None:
        """Asks for the places of others, and for its own as other processes."""
        hellos = [{"learner": m} for m in range(self._terms.num_learners + 1) if m != self._learner]
        hellos += [{"learner": m, "process": 1 << 52} for m in (0, self._learner)]
        hellos += [{"version": 1}, {"rules": "{" * 99}, {"run": "00"}, {"fingerprint": _ESCAPES}]
        hellos += [{"process": time.time_ns() // 1000, "session": "x"}]
        never = threading.Event()
        said = itertools.chain([self._hello(**self._rng.choice(hellos))], _silence(never))
        with self._security.channel(self._address, wire.options(5.0)) as channel:
            call = channel.stream_stream(wire.CONTROL)
            try:
                next(call(said, metadata=self._security.metadata, timeout=3.0))
            finally:
                never.set()

    def _donors(self) -> None:
        """Has other learners' donors wait for it, and takes what one gives, to give it on spoilt."""
        stream = self._channel.stream_stream(wire.PEERS)(iter(()), metadata=self._metadata, timeout=3.0)
        addresses = pb.Peers.FromString(next(stream)).addresses
        never = threading.Event()
        absurd = pb.DonationRequest(versions=[1 << 52] * self._terms.num_fragments).SerializeToString()
        for address in addresses:
            if address.endswith(f":{self._donor.port}"):
                continue
            own = Security(self._peers_token)
            with own.channel(address, wire.options(5.0)) as channel, contextlib.suppress(grpc.RpcError):
                sound = pb.DonationRequest(versions=[0] * self._terms.num_fragments).SerializeToString()
                ask = channel.unary_stream(wire.DONATE)
                self._donor.learn(ask(sound, metadata=own.metadata, timeout=3.0))
            shown = self._rng.choice((own, Security(), self._security))
            with shown.channel(address, wire.options(5.0)) as channel:
                ask = channel.stream_stream(wire.DONATE)
                first = self._rng.choice(([], [b"\xff\xff"], [absurd], [b""]))
                calls = [
                    ask(itertools.chain(first, _silence(never)), metadata=shown.metadata, timeout=3.0)
                    for _ in range(IDLE)
                ]
                never.wait(1.0)
                for call in calls:
                    call.cancel()
        never.set()

    def _unasked(self) -> None:
        given = Contribution(self._learner, self._incarnation, 0, 0, 1, 1, 1)
        self._push("an offer that nobody asked for", up_header(RoundId(1, 0), given, 1 << 50), [b"x"])

    def _garbage(self) -> None:
        said = (b"\xff\xff\xff", b"", bytes(2 * wire.MAX_MESSAGE_BYTES))
        self._said.put(self._rng.choice((self._rng.randbytes(99), *said)))


def _silence(end: threading.Event) -> Iterator[bytes]:
    end.wait(10.0)
    yield from ()
