"""A malicious peer with a learner's credentials: its offers, claims and requests are never sound."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np

from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.compatibility import Terms
from ddiloco.remote.wire.event_messages import up_header
from ddiloco.remote.wire.payload import CHUNK_BYTES
from ddiloco.remote.wire.security import Security
from experiments.studies.chaos.impersonation import BROKEN, CLAIMS, POISONS, Count, Impersonator, silence

IDLE = 20  # silent calls of a kind, at a time
_ESCAPES = "\x1b[2J\x1b[31m\r\n" * 9


class Liar(Impersonator):
    """Each of its connections lies until it is ended."""

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
        """`tokens`: of a step. `count` is called with each attempt, and how its call ended."""
        super().__init__(address, terms, learner, security, tokens, count)
        self._last_step = last_step
        self._deeds = [self._rejoin, self._claim, self._snapshots, self._records, self._events]
        self._deeds += [self._idle, self._others, self._donors, self._unasked, self._garbage]
        self._donor = LyingDonor(count)

    def run(self, stop: threading.Event) -> None:
        """Lies until `stop`, or until the syncer says that the run is over."""
        threading.Thread(target=self._do_deeds, args=(stop,), daemon=True).start()
        super().run(stop)

    def _hello(self, **fields: Any) -> bytes:
        return super()._hello(**{"donor_port": self._donor.port, **fields})

    def _answer(self, which: RoundId) -> None:
        """One of the poisons, under one of the claims or broken."""
        poison, claim = self._rng.choice(list(POISONS)), self._rng.choice([*["honest counts"] * 9, *CLAIMS])
        broken = self._rng.choice(list(BROKEN)) if self._rng.random() < 0.25 else None
        named = broken or (claim if CLAIMS[claim] else poison)
        self._push(f"an offer, {named}", self._offer(which, poison, claim, broken))

    def _do_deeds(self, stop: threading.Event) -> None:
        while not stop.wait(self._rng.uniform(0.1, 0.5)) and not self.over:
            if self._channel is not None:
                deed = self._rng.choice(self._deeds)
                with self._counted(deed.__name__.strip("_")):
                    deed()

    # Its own actions, beside replies.

    def _rejoin(self) -> None:
        for _ in range(self._rng.choice((1, 5, 200))):
            self._incarnation += self._rng.choice((1, 1000))
            self._send_event(events.LearnerJoined(self._learner, self._incarnation))

    def _claim(self) -> None:
        claims = ({"step": self._last_step}, {"step": 1 << 52}, {"steps": 1 << 50}, {"step": 0, "steps": 0})
        self._report(**self._rng.choice(claims))

    def _snapshots(self) -> None:
        number = self._rng.choice((0, 1, 1 << 52))
        self._send_message(
            checkpoint_written={"snapshot": number, "problem": self._rng.choice(("", _ESCAPES))}
        )

    def _records(self) -> None:
        false = [
            pb.Record(alarm={"sentence": f"{self._rng.random()}{_ESCAPES}" * 9, "time": 1e300}),
            pb.Record(step_done={"step": 1 << 52, "time": -1e300, "metrics": {"loss": float("nan")}}),
            pb.Record(noted={"name": f"{self._rng.random()}{_ESCAPES}", "json": "[" * 2000, "time": 0.0}),
            pb.Record(learner_died={"time": time.time(), "traceback": "x" * 40_000}),
        ]
        records = {"first": self._rng.getrandbits(20), "records": self._rng.sample(false, 2)}
        self._send_message(records=pb.Records(**records))

    def _events(self) -> None:
        self._send_event(events.OfferFailed(RoundId(1, 0), 0, self._incarnation, _ESCAPES))
        self._send_event(
            events.LearnerReady(0, self._incarnation, 1 << 50, (1 << 50,) * self._terms.num_fragments)
        )
        self._send_event(events.LearnerLost(0, self._incarnation, _ESCAPES))

    def _idle(self) -> None:
        """Silent calls of every kind, for a while."""
        never = threading.Event()
        calls = [
            self._channel.stream_stream(kind)(silence(never), metadata=self._metadata, timeout=3.0)
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
        sent = itertools.chain([self._hello(**self._rng.choice(hellos))], silence(never))
        with self._security.channel(self._address, wire.options(5.0)) as channel:
            call = channel.stream_stream(wire.CONTROL)
            try:
                next(call(sent, metadata=self._security.metadata, timeout=3.0))
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
                    ask(itertools.chain(first, silence(never)), metadata=shown.metadata, timeout=3.0)
                    for _ in range(IDLE)
                ]
                never.wait(1.0)
                for call in calls:
                    call.cancel()
        never.set()

    def _unasked(self) -> None:
        given = Contribution(self._learner, self._incarnation, 0, 0, 1, 1, 1)
        header = up_header(RoundId(1, 0), given, 1 << 50).SerializeToString()
        self._push("an offer that nobody asked for", [header, b"x"])

    def _garbage(self) -> None:
        sent = (b"\xff\xff\xff", b"", bytes(2 * wire.MAX_MESSAGE_BYTES))
        self._outgoing.put(self._rng.choice((self._rng.randbytes(99), *sent)))


class LyingDonor:
    """Gives what a peer gave, the sign of every number turned, as if it had trained longer than all."""

    def __init__(self, count: Count) -> None:
        """`count` is called with each donation."""
        self._count = count
        self._header: pb.DonationHeader | None = None
        self._payload = b""
        self._server = wire.server(20.0, 8)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        wire.serve(self._server, wire.DONATE, {"Donate": grpc.stream_stream_rpc_method_handler(self._donate)})

    def learn(self, donation: Iterator[bytes]) -> None:
        """Takes a sound donation, to give it on."""
        header = pb.DonationHeader.FromString(next(donation))
        payload = np.frombuffer(b"".join(donation), np.uint8)
        words = payload[: len(payload) // 4 * 4].view(np.uint32) ^ np.uint32(1 << 31)
        self._header, self._payload = header, words.tobytes() + payload[words.nbytes :].tobytes()

    def _donate(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        wanted = pb.DonationRequest.FromString(next(requests, b""))
        if self._header is None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        header = pb.DonationHeader()
        header.CopyFrom(self._header)
        header.versions[:] = wanted.versions
        header.trained = 1 << 50
        yield header.SerializeToString()
        for at in range(0, len(self._payload), CHUNK_BYTES):
            yield self._payload[at : at + CHUNK_BYTES]
        self._count("a false inner state: given")
