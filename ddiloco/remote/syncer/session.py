"""The syncer's side of one learner's connection: its messages, its hosts' offers, its open requests."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import grpc
import numpy as np

from ddiloco.arrays.blocks import Blocks, Cut, Gathered
from ddiloco.outer.codecs import ArrayFormat
from ddiloco.protocol import events
from ddiloco.protocol.messages import Report, RoundId
from ddiloco.protocol.policy import MAX_AGE
from ddiloco.remote.syncer.downlink import Downlink
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.calls import Call, Refused, Wakeups, event_loop
from ddiloco.remote.wire.event_messages import from_syncer
from ddiloco.remote.wire.security import UNKNOWN, Caller
from ddiloco.remote.wire.validation import HOST_KEY, WireError, metadata_value
from ddiloco.workers.exchange import CheckpointAsked, Delivery, EventDelivery, Leave

MAX_CALLS = 16  # of one kind at the same time, for each host that there is room for
LAST_SECONDS = 5.0  # for a learner to take its last messages, before its control stream is cut off
MAX_WAITING = 256  # messages to a learner that does not read; then the oldest is lost, as any may be


class Session:
    """A LearnerLink over one control stream. Used by the syncer's threads and by its event loop."""

    def __init__(
        self,
        name: str,
        learner: int,
        process: int,
        down: Downlink,
        donor: str | None = None,
        caller: Caller = UNKNOWN,
        room: int = 1,
    ) -> None:
        """`name` is known only to this learner's process. `room`: the hosts for whose calls there is room."""
        self.down, self.hosts, self._max_calls = down, down.hosts, MAX_CALLS * room
        self.offers = HostOffers(self.hosts) if self.hosts > 1 else None  # puts together what they send
        self.name, self.learner, self.process = name, learner, process
        self.donor = donor  # HOST:PORT at which the learner answers its peers
        self.caller = caller
        self.heard_at = time.monotonic()
        self.incarnation = 0  # the newest that has joined or reported over this connection
        self.counted = 0  # the newest incarnation that takes part, by the syncer's word
        self.report: Report | None = None  # the last one over this connection
        self.newest_incarnation = 0  # of the learner, beyond which its next ones do not leap
        self.reason = "connection lost"  # why it ended
        self._change = threading.Lock()
        self.wakeups = Wakeups()  # of the control stream
        self._waiting: collections.deque[pb.ToLearner] = collections.deque()
        # By fragment and host, the offers that the learner may send
        self._asked: dict[tuple[int, int], collections.deque[RoundId]] = collections.defaultdict(
            lambda: collections.deque(maxlen=MAX_AGE)
        )
        self.over = False  # whether the connection has ended
        self.control: Call | None = None  # of the control stream
        self._calls: collections.Counter[str] = collections.Counter()
        self._open_calls: list[Call] = []

    # What the syncer calls.

    def deliver(self, delivery: Delivery) -> None:
        """Queues something for the learner without waiting for it."""
        match delivery:
            case EventDelivery(events.Welcomed() | events.UpdateArrived()):
                self.down.put(delivery)
            case EventDelivery(events.OfferAsked() as event):
                with self._change:
                    for host in range(self.hosts):
                        self._asked[event.round.fragment, host].append(event.round)
                self.say(from_syncer(event))
            case EventDelivery(event):
                self.say(from_syncer(event), replaces=isinstance(event, events.ClockSet | events.TimingSet))
            case CheckpointAsked(number):
                self.say(pb.ToLearner(checkpoint_asked=number))
            case Leave():
                self.say(pb.ToLearner(leave=True))

    def limit(self, rate: float | None, shards: int) -> None:
        """Limits both directions of the link to so many bytes a second; this is one of so many shards."""
        self.down.limit.set_rate(rate and rate / shards)
        self.say(pb.ToLearner(limit=rate or 0.0), replaces=True)

    def begun(self, incarnation: int) -> None:
        """The incarnation is live at the syncer."""
        self.counted = incarnation

    @property
    def may_give(self) -> bool:
        """Whether peers may ask for its inner state."""
        # One that has joined, but does not count yet, may hold what a rollback has undone.
        return bool(self.donor and self.counted and self.counted == self.incarnation)

    def say(self, message: pb.ToLearner, replaces: bool = False) -> None:
        """Puts a message into the control stream; with `replaces` in place of those of its kind."""
        with self._change:
            if replaces:
                others = [m for m in self._waiting if _kind(m) != _kind(message)]
                self._waiting = collections.deque(others)
            if len(self._waiting) >= MAX_WAITING:
                self._waiting.popleft()
            self._waiting.append(message)
        self.wakeups.set()

    # What the server calls.

    def expects(self, round_id: RoundId, host: int) -> bool:
        """Whether the learner was asked for this and the host has not begun to send it, as it may once."""
        with self._change:
            asked = self._asked.get((round_id.fragment, host), ())
            if round_id not in asked:
                return False
            while asked.popleft() != round_id:  # those asked for before it do not come any more
                pass
            return True

    @contextlib.contextmanager
    def call(self, kind: str, call: Call) -> Iterator[int]:
        """One call of the kind beside the control stream; gives the number of the calling host.

        Raises:
          Refused: there are too many at the same time, or there is no such host.
        """
        named = metadata_value(call.context.invocation_metadata(), HOST_KEY) or "0"
        host = int(named) if named.isdecimal() and len(named) < 6 else self.hosts
        if host >= self.hosts:
            raise Refused(grpc.StatusCode.NOT_FOUND, "the learner has no such host")
        with self._change:
            self._calls[kind] += 1
            many = self._calls[kind] > self._max_calls
            self._open_calls.append(call)
            over = self.over
        try:
            if over:
                raise Refused(grpc.StatusCode.NOT_FOUND, "the session is over")
            if many:
                told = f"more than {self._max_calls} calls of a kind, by remote.hosts"
                raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, told)
            yield host
        finally:
            with self._change:
                self._calls[kind] -= 1
                self._open_calls.remove(call)

    def messages(self) -> Iterator[bytes]:
        """The messages that wait for the control stream; after its end these are the last ones."""
        while True:
            with self._change:
                if not self._waiting:
                    return
                message = self._waiting.popleft()
            yield message.SerializeToString()

    def close(self, reason: str) -> bool:
        """Ends the streams and all calls; returns whether the session was open."""
        with self._change:
            if self.over:
                return False
            self.over, self.reason = True, reason
            calls = [*self._open_calls]
        self.wakeups.set()
        self.down.close()
        for call in calls:
            call.cancel()
        if self.control is not None:  # without a reader it would not end
            event_loop().call_later(LAST_SECONDS, self.control.cancel)
        return True


def _kind(message: pb.ToLearner) -> str | None:
    return message.event.WhichOneof("kind") or message.WhichOneof("kind")


class _Growing:
    """An offer of which some hosts have sent their blocks."""

    def __init__(
        self, offer: events.FragmentArrived, formats: Sequence[ArrayFormat], blocks: Sequence[Blocks]
    ) -> None:
        self.offer = offer
        of = zip(blocks, formats, strict=True)
        self.gathered = [Gathered(Cut.whole(part.shape), form.dtype) for part, form in of]
        self.hosts: set[int] = set()


class HostOffers:
    """Incomplete offers of a learner, at most one a fragment; a newer one replaces an incomplete one."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self._lock = threading.Lock()
        self._growing: dict[int, _Growing] = {}  # by fragment

    def add(
        self,
        host: int,
        offer: events.FragmentArrived,
        formats: Sequence[ArrayFormat],
        blocks: Sequence[Blocks],
    ) -> tuple[np.ndarray, ...] | None:
        """Adds one host's blocks; returns the arrays once all hosts' have arrived.

        Raises:
          WireError: the hosts differ on the offer, or their blocks do not make up the arrays.
        """
        fragment = offer.round.fragment
        with self._lock:
            growing, step = self._growing.get(fragment), offer.contribution.step
            same = growing is not None and growing.offer.round == offer.round
            if same and step < growing.offer.contribution.step:
                raise WireError("another offer", "a newer one has arrived already")
            if not same or step > growing.offer.contribution.step or host in growing.hosts:
                growing = _Growing(offer, formats, blocks)  # what came before will never be whole
            self._growing.pop(fragment, None)
            if growing.offer != offer:
                raise WireError("another offer", "a learner's hosts differ on it")
            try:
                for gathered, part in zip(growing.gathered, blocks, strict=True):
                    gathered.add(part)
                growing.hosts.add(host)
                if len(growing.hosts) < self._hosts:
                    self._growing[fragment] = growing
                    return None
                whole = [gathered.blocks().all for gathered in growing.gathered]
            except ValueError as error:
                raise WireError("blocks that are no fragment", str(error)) from None
        return tuple(array.reshape(form.shape) for array, form in zip(whole, formats, strict=True))
