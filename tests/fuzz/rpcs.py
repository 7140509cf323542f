"""The rpcs of syncer and learner on real servers, called on the loopback with messages nobody would send."""

import functools
import queue
import threading

import grpc
import jax
import numpy as np

from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.protocol.parts import AuthorityCore
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.remote.learner.donor import Donor
from ddiloco.remote.learner.inner_format import InnerFormat
from ddiloco.remote.syncer.part_links import PartLinks
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.blocks import cut_message
from ddiloco.remote.wire.event_messages import up_header
from ddiloco.remote.wire.payload import chunks, payload_bytes
from ddiloco.remote.wire.security import Security
from ddiloco.storage.run_mark import RunMark
from ddiloco.workers.exchange import InnerState
from tests.remote.ends import TERMS, LearnerEnd, SyncerEnd, arrays, asked, greeting, joined, report, until

SECONDS = 20.0  # within which every call ends by itself
KINDS = ("control", "greeted", "offers", "peers", "donation", "updates", "part", "words")
FRAGMENT = 0


def split(data):
    """The messages in the data: a byte before each says how long it is, twice as much from 128 on."""
    messages = []
    while data:
        length = data[0] if data[0] < 128 else 2 * data[0]
        messages.append(bytes(data[1 : 1 + length]))
        data = data[1 + length :]
    return messages


def joint(*messages):
    """What `split` takes apart again."""
    lengths = [len(m) if len(m) < 128 else 128 + max(0, len(m) - 255) // 2 for m in messages]
    return b"".join(bytes([n]) + m for n, m in zip(lengths, messages, strict=True))


def said(kind, *messages):
    """The data of which `call` makes this call."""
    return bytes([KINDS.index(kind)]) + joint(*messages)


def parts_greeting(part=0):
    hello = pb.FromPart.Hello(version=wire.VERSION, fingerprint=TERMS.fingerprint, rules=TERMS.rules)
    hello.part, hello.parts, hello.process, hello.address = part, 2, 7, "127.0.0.1:7100"
    return pb.FromPart(hello=hello).SerializeToString()


def sound_offer():
    contribution = Contribution(0, 100, FRAGMENT, 0, 4, 3, 30)
    given = arrays(FRAGMENT, 5)
    header = up_header(RoundId(4, FRAGMENT), contribution, payload_bytes(given))
    return [header.SerializeToString(), *map(bytes, chunks(given))]


INNER = InnerFormat([jax.ShapeDtypeStruct((3,), np.float32)])


def wanted():
    """A request for all of that."""
    return pb.DonationRequest(versions=[1, 2], wanted=map(cut_message, INNER.needs))


class Giving:
    """An inbox of a learner that gives its inner state at once, whatever versions are asked for."""

    def put(self, wanted):
        if wanted.answer.set_running_or_notify_cancel():
            wanted.answer.set_result(InnerState(4, (0, 0), [np.zeros(3, np.float32)]))


class AuthorityEnd:
    """A server that leaves merging to two parts, and the core that hears what they say."""

    def __init__(self):
        self.records, self._heard, self._now = [], queue.SimpleQueue(), 0.0
        mark = RunMark("run", "start")
        links = PartLinks(2, TERMS, Security(), mark, self._heard.put, self.records.append)
        self.end = SyncerEnd(parts=links)
        policy = SyncPolicy(num_learners=2, num_fragments=TERMS.num_fragments, interval=4)
        self._core = AuthorityCore(policy, 12, None, 2)

    def take(self):
        """Has the core hear what came."""
        while not self._heard.empty():
            told = self._heard.get()
            self._now += 0.1
            self._core.handle(told, self._now)


class Rpcs:
    """One server of each for all calls, and a learner that is connected all the while."""

    def __init__(self):
        self._failures = []
        threading.excepthook = self._failures.append
        self._syncer = SyncerEnd()
        self._learner = LearnerEnd(self._syncer.address)
        self._link = joined(self._syncer, self._learner)
        self._channel = grpc.insecure_channel(self._syncer.address)
        self._session = ""
        until(lambda: self._learner.client._connection is not None, "the connection")
        self._metadata = self._learner.client._connection._metadata
        donor = Donor(Security(), SECONDS)
        donor.attach(Giving(), INNER)
        self._donor = grpc.insecure_channel(f"127.0.0.1:{donor.start('127.0.0.1')}")
        self._keeps = donor
        self._authority = AuthorityEnd()
        self._parts = grpc.insecure_channel(self._authority.end.address)

    def end(self):
        """Ends servers and calls: the interpreter waits for their threads."""
        self._channel.close()
        self._donor.close()
        self._parts.close()
        self._authority.end.server.stop(0.0)
        self._learner.client.finish(0.0)
        self._syncer.server.stop(0.0)
        self._keeps.stop()

    def call(self, kind, messages):
        """Makes the call, and looks whether anything raised; says how the call ended."""
        ended = kind
        self._learner.send(report(0, 100, 4))  # one that is silent for long may be replaced
        try:
            getattr(self, f"_{kind}")(messages)
        except grpc.RpcError as error:
            ended = f"{kind}: {error.code()}: {error.details()}"
            assert error.code() not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED), ended
        assert not self._failures, self._failures
        assert self._learner.client._connection._metadata == self._metadata, "the other learner is disturbed"
        self._forget()
        return ended

    def _control(self, messages):
        list(self._channel.stream_stream(wire.CONTROL)(iter(messages), timeout=SECONDS))

    def _greeted(self, messages):
        said = iter([greeting(learner=1, session=self._session), *messages])
        for answer in self._channel.stream_stream(wire.CONTROL)(said, timeout=SECONDS):
            told = pb.ToLearner.FromString(answer)
            if told.WhichOneof("kind") == "accepted":
                self._session = told.accepted.session

    def _offers(self, messages):
        self._link.deliver(asked(FRAGMENT))
        send = self._channel.stream_unary(wire.OFFERS)
        send(iter(messages), metadata=self._metadata, timeout=SECONDS)

    def _peers(self, messages):
        ask = self._channel.stream_stream(wire.PEERS)
        list(ask(iter(messages), metadata=self._metadata, timeout=SECONDS))

    def _updates(self, messages):
        """Of the session that the first message names, or of the learner's, which then takes no update."""
        session, *rest = [*messages, b""]
        metadata = ((wire.SESSION_KEY, session.hex()),) if session else self._metadata
        ask = self._channel.stream_stream(wire.UPDATES)
        stream = ask(iter(rest), metadata=metadata, timeout=SECONDS)
        if session:
            list(stream)
        stream.cancel()

    def _donation(self, messages):
        list(self._donor.stream_stream(wire.DONATE)(iter(messages), timeout=SECONDS))

    def _part(self, messages):
        """A goodbye ends what is sound."""
        said = [*messages, pb.FromPart(goodbye=True).SerializeToString()]
        list(self._parts.stream_stream(wire.PART)(iter(said), timeout=SECONDS))
        self._authority.take()

    def _words(self, messages):
        self._part([parts_greeting(), *messages])

    def _forget(self):
        """What was heard, so that hours of it need no memory."""
        self._syncer.records.clear()
        self._authority.records.clear()
        for inbox in (self._syncer.heard, self._syncer.offers, self._learner.inbox):
            try:
                while True:
                    inbox.get_nowait()
            except queue.Empty:
                pass
        self._learner.notes.clear()


@functools.cache
def rpcs():
    """The server of this process."""
    return Rpcs()


def call(data):
    """The first byte says what is called."""
    if data:
        return rpcs().call(KINDS[data[0] % len(KINDS)], split(data[1:]))
