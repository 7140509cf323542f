"""Both ends of a real wire in one process, with queues in place of a syncer and a learner."""

import contextlib
import queue
import subprocess
import threading
import time

import numpy as np

from ddiloco.outer.codecs import ArrayFormat
from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report, RoundId
from ddiloco.remote.learner.client import ShardBook, SyncerClient
from ddiloco.remote.learner.streams import HostWire
from ddiloco.remote.syncer.listening import Listening
from ddiloco.remote.syncer.server import SyncerPort, SyncerServer
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.compatibility import Terms
from ddiloco.remote.wire.event_messages import update_of
from ddiloco.remote.wire.payload import receive
from ddiloco.remote.wire.security import Security
from ddiloco.settings.remote import RemoteConfig
from ddiloco.telemetry import records
from ddiloco.workers.exchange import EventDelivery
from ddiloco.workers.transfer import Offer
from tests.integration.programs import ROOT

TIMEOUT = 30.0
CONFIG = RemoteConfig(longest_backoff=0.25)
F32 = np.dtype(np.float32)
FORMATS = (
    (ArrayFormat((3, 5), F32), ArrayFormat((7,), np.dtype(np.uint8)), ArrayFormat((), F32)),
    (ArrayFormat((700, 1000), F32), ArrayFormat((0, 4), F32)),  # more than two chunks, and an empty array
)
TERMS = Terms("layout", "rules", 2, 2, (FORMATS,), FORMATS, FORMATS, TIMEOUT)


def until(condition, told="it", timeout=TIMEOUT):
    """Looks until the condition holds, which must be within `timeout` seconds.

    The longer it takes the less often, as who looks takes time from whom is waited for.
    """
    between_looks, begun = threading.Event(), time.monotonic()
    while not condition():
        waited = time.monotonic() - begun
        assert waited < timeout, f"{told} did not happen"
        between_looks.wait(min(0.1, 0.01 + waited / 20))


def alive(pid):
    """Whether the process still runs."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def error_of(function, *arguments):
    """The error that the call raises; None if it raises none."""
    try:
        function(*arguments)
    except Exception as error:
        return error
    return None


def arrays(fragment, value):
    """Arrays of a fragment, told apart by their value."""
    return tuple(np.full(part.shape, value, part.dtype) for part in FORMATS[fragment])


def welcome(incarnation, step=0, version=0):
    """A welcome whose fragments hold their version."""
    event = events.Welcomed(incarnation, step, (version,) * 2, (step,) * 2, (0, 1))
    return EventDelivery(event, [arrays(p, version) for p in range(2)])


def update(fragment, version, step=0):
    """An update that holds its version."""
    return EventDelivery(events.UpdateArrived(fragment, version, step), [arrays(fragment, version)])


def streamed(down, host=0, needs=None):
    """All messages of a downlink's stream; waits for more until it is closed."""
    changed = threading.Event()
    with down.wakeups.added(changed.set):
        while not down.closed:
            for message in down.messages(host, needs):
                if isinstance(message, float):
                    changed.wait(message)
                else:
                    yield message
            changed.wait()
            changed.clear()


class Taker:
    """One stream that takes fragments off a downlink when it is told to."""

    def __init__(self, down):
        self._messages = streamed(down)

    def next(self):
        header = pb.DownHeader.FromString(next(self._messages))
        update = update_of(header, 2)
        return header, update, receive(FORMATS[update.fragment], header.size, self._messages)


def asked(fragment, step=4):
    """A question for a fragment, for the round of this step."""
    return EventDelivery(events.OfferAsked(RoundId(step, fragment), 0, step))


def report(learner, incarnation, step):
    """A report of a learner that has worked on version 0."""
    return events.StepReported(Report(learner, incarnation, step, (FragmentCounters(0, step, step),) * 2))


class Taken(list):
    """Records in their order, which count as written at once."""

    def append(self, record):
        if isinstance(record, records.Flush):
            record.done()
        else:
            super().append(record)


class SyncerEnd(SyncerPort):
    """A SyncerServer, what it hears, and the links that it makes."""

    crowded = False

    def __init__(
        self,
        terms=TERMS,
        security=None,
        config=CONFIG,
        address="127.0.0.1:0",
        opened=True,
        boundary_seconds=lambda learner: 0.0,
        **more,
    ):
        self.heard, self.offers, self.records = queue.SimpleQueue(), queue.SimpleQueue(), []
        self.boundary_seconds = boundary_seconds
        self.links = {}
        security = security or Security()
        listening = Listening(address, security, config, terms.max_learners)
        self.server = SyncerServer(terms, security, listening, self, self.records.append, **more)
        self.port = self.server.start()
        if opened:
            self.server.open()
        self.address = f"localhost:{self.port}"

    def connect(self, learner, incarnation, link):
        self.links[learner, incarnation] = link

    def send(self, event):
        self.heard.put(event)

    def take_offer(self, event, arrays):
        self.offers.put((event, arrays))

    def next(self, kind):
        """The next event, which must be of the kind."""
        event = self.heard.get(timeout=TIMEOUT)
        assert isinstance(event, kind), event
        return event

    def taken(self):
        """The contribution and the arrays of the next offer."""
        event, arrays = self.offers.get(timeout=TIMEOUT)
        return event.contribution, arrays

    def die(self):
        """Goes without a word, as when its process is killed."""
        self.server._listening.stop(None)

    def drops(self):
        """The reasons of all drops so far."""
        return [values["reason"] for values in self.noted("drop")]

    def noted(self, name):
        """The values of all records of this name so far."""
        return [r.values for r in list(self.records) if isinstance(r, records.Noted) and r.name == name]

    def alarms(self):
        """The sentences of all alarms so far."""
        return [r.sentence for r in self.records if isinstance(r, records.Alarm)]


class Deliveries(queue.SimpleQueue):
    """What a syncer has sent; that a connection is lost, the client itself says."""

    def put(self, delivery):
        if not isinstance(getattr(delivery, "event", None), events.Disconnected):
            super().put(delivery)


class LearnerEnd:
    """A SyncerClient with an inbox."""

    def __init__(
        self,
        address,
        learner=0,
        process=100,
        terms=TERMS,
        security=None,
        config=CONFIG,
        donor_port=0,
        shard=0,
        book=None,
        gives_at=None,
    ):
        self.inbox, self.notes = Deliveries(), []
        own = HostWire(terms, security or Security(), config)
        book = book or ShardBook(address, learner, process, terms.shards)
        self.client = SyncerClient(book, shard, own, self.notes.append, gives_at or ("", donor_port))
        self.client.attach(self.inbox)
        self.client.start()
        self.send = self.client.outbox.send

    def next(self, kind):
        """The next delivery, which must be of the kind, or tell an event that is."""
        delivery = self.inbox.get(timeout=TIMEOUT)
        assert isinstance(delivery, kind) or isinstance(delivery.event, kind), delivery
        return delivery

    def offer(self, fragment, value, given=None, step=4, version=0):
        """Offers arrays, full of one value unless given, for the round of the step; what it claims."""
        contribution = Contribution(0, 100, fragment, version, step, 3, 30)
        offer = Offer(given or arrays(fragment, value))
        self.client.send(RoundId(step, fragment), contribution, offer)
        return contribution


def certificates(folder, *more):
    """Makes certificates for `localhost` in the folder."""
    made = [ROOT / "scripts/make_certs.sh", folder, *more, "localhost"]
    subprocess.run(made, check=True, capture_output=True)


@contextlib.contextmanager
def ended(*ends):
    """Ends servers and clients, the clients first."""
    try:
        yield ends
    finally:
        for end in sorted(ends, key=lambda end: isinstance(end, SyncerEnd)):
            if isinstance(end, SyncerEnd):
                end.server.stop(0.0)
            else:
                end.client.finish(0.0)


def joined(syncer, learner, incarnation=100, number=0):
    """Has a learner join and the syncer count it, and gives the syncer's link to it."""
    learner.send(events.LearnerJoined(number, incarnation))
    assert syncer.next(events.LearnerJoined).incarnation == incarnation
    link = syncer.links[number, incarnation]
    link.begun(incarnation)
    return link


def ask(learner, link, fragment, step=4):
    """Has the learner asked for a fragment; gives the learner, which knows it now."""
    link.deliver(asked(fragment, step))
    learner.next(events.OfferAsked)
    return learner


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def said(**kind):
    return pb.FromLearner(**kind).SerializeToString()


def greeting(terms=TERMS, **fields):
    """The first message of a learner's connection, with these fields of its hello."""
    agreed = {"version": wire.VERSION, "fingerprint": terms.fingerprint, "rules": terms.rules}
    return said(hello=pb.Hello(**{**agreed, "process": 100, **fields}))
