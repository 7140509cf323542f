"""A learner that knows the token and the wire and means no good; random bytes from who knows neither."""

import contextlib
import itertools
import queue
import random
import socket
import threading
import time

import grpc
import numpy as np

from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report
from ddiloco.remote.wire import agreement as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.event_messages import from_learner, syncer_event, up_header
from ddiloco.remote.wire.payload import chunks, payload_bytes, receive
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.terms import terms_of
from ddiloco.run.recipes import assembly_of
from ddiloco.settings.experiment import parse
from experiments.front import cli
from tests.integration.hand import TOKEN
from tests.remote.ends import PATIENCE

METADATA = Security(TOKEN).metadata
AHEAD = 2  # steps that it claims beyond the newest update: no more than a learner can have taken
EVIL = {  # what it sends in a fragment's place: (messages of a sound offer) -> messages
    "not finite": lambda header, arrays: sound(header, filled(arrays, np.nan)),
    "infinite": lambda header, arrays: sound(header, filled(arrays, np.inf)),
    "of another size": lambda header, arrays: sound(changed(header, size=1 << 50), arrays),
    "cut short": lambda header, arrays: [header.SerializeToString(), b"only this"],
    "too long": lambda header, arrays: [*sound(header, arrays)[:1], bytes(header.size + 1)],
    "an empty chunk": lambda header, arrays: [header.SerializeToString(), b""],
    "another fragment": lambda header, arrays: sound(
        changed(header, fragment=(header.contribution.fragment + 1) % 3), arrays
    ),
    "a number beyond all": lambda header, arrays: sound(changed(header, tokens=1 << 60), arrays),
    "an old version": lambda header, arrays: sound(
        changed(header, version=header.contribution.version - 1), arrays
    ),
    "no work": lambda header, arrays: sound(changed(header, steps=0), arrays),
    "garbage": lambda header, arrays: [b"\xff\xff\xff"],
    "without end": lambda header, arrays: itertools.chain(sound(header, arrays)[:1], iter(lambda: b"x", b"")),
    "nothing": lambda header, arrays: [],
}
AGAIN = ("not finite", "an old version", "no work")


def sound(header, arrays):
    return [header.SerializeToString(), *chunks(arrays)]


def filled(arrays, value):
    return tuple(np.full_like(array, value) for array in arrays)


def changed(header, **fields):
    other = pb.UpHeader()
    other.CopyFrom(header)
    for name, value in fields.items():
        setattr(other if name == "size" else other.contribution, name, value)
    return other


def terms(settings):
    """The Terms of a run with these settings, `--config=FILE` and then `--config.path=value` each."""
    file, *overrides = [setting.removeprefix("--config").split("=", 1) for setting in settings]
    experiment = parse(cli.resolve(file[1], [(path[1:], value) for path, value in overrides]))
    return terms_of(experiment, assembly_of(experiment).layout)


class Impostor:
    """Joins as a learner that is ahead of all, and answers each question with the next of EVIL.

    Then in turn with a sound one, sent twice, and with one of AGAIN: what comes once the merge has begun
    is told as late, whatever is wrong with it, and has to be sent again to be told for what it is.
    """

    def __init__(self, address, terms, learner):
        self.answers = {}  # by name of what was sent: the code that the call ended with, None if taken
        self.learner, self._terms = learner, terms
        self._channel = grpc.insecure_channel(address, wire.options(20.0))
        self._said = queue.SimpleQueue()
        self._versions, self._lineages, self._steps, self._pieces = {}, {}, {}, {}
        self._incarnation = time.time_ns() // 1000
        self._left = list(EVIL)
        self._then = itertools.cycle((None, *AGAIN))
        self.replayed = []  # the codes that the replays of a sound one ended with
        self._control = self._channel.stream_stream(wire.CONTROL)(
            iter(self._said.get, None), metadata=METADATA
        )
        hello = pb.Hello(
            version=wire.VERSION,
            fingerprint=terms.fingerprint,
            rules=terms.rules,
            learner=learner,
            process=self._incarnation,
        )
        self.say(hello=hello)
        accepted = pb.ToLearner.FromString(next(self._control)).accepted
        self._metadata = (*METADATA, (wire.SESSION_KEY, accepted.session))
        for target in (self._hear, self._take_updates):
            threading.Thread(target=target, daemon=True).start()
        self.tell(events.LearnerJoined(self.learner, self._incarnation))

    @property
    def done(self):
        """Whether all of EVIL has been sent, and a sound offer whose replay was refused.

        A replay is taken where the syncer has asked for the same round again meanwhile.
        """
        return not self._left and grpc.StatusCode.NOT_FOUND in self.replayed

    def say(self, **kind):
        self._said.put(pb.FromLearner(**kind).SerializeToString())

    def tell(self, event):
        self._said.put(from_learner(event).SerializeToString())

    def leave(self):
        self._said.put(None)
        self._control.cancel()
        self._channel.close()

    def _take_updates(self):
        stream = self._channel.unary_stream(wire.UPDATES)(b"", metadata=self._metadata)
        with contextlib.suppress(grpc.RpcError, ValueError):
            for data in stream:
                header = pb.DownHeader.FromString(data)
                p = header.update.fragment
                self._pieces[p] = receive(self._terms.down[p], header.size, stream)
                self._versions[p], self._steps[p] = (
                    header.update.version,
                    max(header.step, header.update.step),
                )
                self._lineages[p] = header.update.lineage
                if len(self._versions) == self._terms.num_fragments:
                    self._report()

    def _report(self):
        count = self._terms.num_fragments
        counters = tuple(FragmentCounters(self._versions[p], AHEAD, AHEAD) for p in range(count))
        step = max(self._steps.values()) + AHEAD
        self.tell(events.StepReported(Report(self.learner, self._incarnation, step, counters)))

    def _hear(self):
        with contextlib.suppress(grpc.RpcError, ValueError):
            for data in self._control:
                message = pb.ToLearner.FromString(data)
                if message.event.WhichOneof("kind") == "offer_asked":
                    self._answer(syncer_event(message).round)
                    self._report()

    def _offer(self, round_id):
        """Header and arrays of an offer that would be sound: of two steps that changed nothing."""
        p = round_id.fragment
        arrays = self._pieces[p]
        step, work = self._steps[p] + AHEAD, (AHEAD, AHEAD, self._lineages[p])
        given = Contribution(self.learner, self._incarnation, p, self._versions[p], step, *work)
        return up_header(round_id, given, payload_bytes(arrays)), arrays

    def _answer(self, round_id):
        header, arrays = self._offer(round_id)
        name = self._left.pop(0) if self._left else next(self._then)
        if name:
            self._push(name, EVIL[name](header, arrays))
            return
        self._push("sound", sound(header, arrays))
        self.replayed.append(self._push("replayed", sound(header, arrays)))

    def _push(self, name, messages):
        try:
            send = self._channel.stream_unary(wire.OFFERS)
            timeout = None if name == "without end" else self._terms.offer_timeout
            send(iter(messages), metadata=self._metadata, timeout=timeout)
            self.answers[name] = None
        except grpc.RpcError as error:
            self.answers[name] = error.code()
        return self.answers[name]


def misspoken(address, terms, learner):
    """Connections with the token that say what cannot be read; the code that each ends with."""
    hello = pb.Hello(
        version=wire.VERSION, fingerprint=terms.fingerprint, rules=terms.rules, learner=learner, process=1
    )
    greeting = pb.FromLearner(hello=hello).SerializeToString()
    record = pb.Record(state_changed=pb.StateChanged(state="asleep"))
    said = {
        "malformed message": b"\xff\xff\xff",
        "number too large": from_learner(events.LearnerJoined(0, 1 << 60)).SerializeToString(),
        "another number of fragments": from_learner(events.LearnerReady(0, 1, 1, (1,))).SerializeToString(),
        "malformed record": pb.FromLearner(records=pb.Records(records=[record])).SerializeToString(),
        "beyond the bound": bytes(2 * wire.MAX_MESSAGE_BYTES),
    }
    codes = {}
    for name, message in said.items():
        with grpc.insecure_channel(address) as channel:
            call = channel.stream_stream(wire.CONTROL)(iter([greeting, message]), metadata=METADATA)
            try:
                list(call)
                codes[name] = None
            except grpc.RpcError as error:
                codes[name] = error.code()
    return codes


def noise(address, seed, connections=20):
    """Random bytes to the port, now and then after the words with which HTTP/2 begins."""
    rng = random.Random(seed)
    host, port = address.rsplit(":", 1)
    for _ in range(connections):
        with (
            socket.create_connection((host, int(port)), PATIENCE) as connection,
            contextlib.suppress(OSError),
        ):
            if rng.random() < 0.5:
                connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            connection.sendall(rng.randbytes(rng.randrange(1, 20_000)))
