"""The queue of fragments to a learner: numbers only, so that a slow learner costs no memory."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ddiloco.arrays.blocks import Cut
from ddiloco.protocol import events
from ddiloco.protocol.messages import NOTHING_MERGED
from ddiloco.protocol.state import NO_WATERMARKS, Watermarks
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.calls import Wakeups
from ddiloco.remote.wire.payload import chunks, payload_bytes
from ddiloco.remote.wire.token_bucket import TokenBucket
from ddiloco.remote.wire.validation import MAX_DIFFERENCES
from ddiloco.schema.codec import fields_of
from ddiloco.telemetry.throughput import Throughput
from ddiloco.workers.exchange import EventDelivery, Pieces, fragments_with

MAX_AHEAD = 4  # fragments by which one of a learner's hosts may be ahead of another


class Version(NamedTuple):
    """One version of a fragment."""

    update: events.UpdateArrived  # without a watermark: each learner gets its own
    pieces: Pieces
    watermarks: Watermarks
    header: pb.DownHeader  # to all learners, but for their watermarks

    def to(self, learner: int) -> pb.DownHeader:
        """The header with this learner's watermark."""
        header = pb.DownHeader()
        header.CopyFrom(self.header)
        own = self.watermarks.get(learner, NOTHING_MERGED)
        header.update.watermark.life, header.update.watermark.steps = own.life, own.steps
        return header


class NewestFragments:
    """The newest version of each fragment that the syncer has sent; shared by all downlinks.

    Also the last differences that lead to it, of at most half of its bytes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[int, Version] = {}
        self._differences: dict[int, list[Pieces]] = {}

    def put(
        self,
        update: events.UpdateArrived,
        pieces: Pieces,
        difference: Pieces = (),
        watermarks: Watermarks = NO_WATERMARKS,
        statement: bytes = b"",
    ) -> None:
        """Keeps it unless a newer one is known; `difference` leads to it from the version before."""
        fragment = update.fragment
        with self._lock:
            newest = self._newest.get(fragment)
            known = -1 if newest is None else newest.update.version
            # With the same arrays it is a broadcast's to its second learner, or a further one.
            if update.version < known or (
                newest is not None and update.version == known and newest.pieces is pieces
            ):
                return
            header = pb.DownHeader(update=fields_of(update), statement=statement)
            self._newest[fragment] = Version(update, pieces, watermarks, header)
            if newest is None or update.version == known:
                return
            follows = bool(difference) and update.version == known + 1
            differences = [*self._differences.get(fragment, ()), difference] if follows else []
            most = payload_bytes(pieces) // (2 * payload_bytes(difference)) if follows else 0
            self._differences[fragment] = differences[-min(most, MAX_DIFFERENCES) :] if most else []

    def get(self, fragment: int) -> Version:
        """The newest; one must have been put."""
        with self._lock:
            return self._newest[fragment]

    def since(self, fragment: int, version: int | None) -> tuple[Version, Sequence[Pieces]]:
        """The newest, and the differences that lead to it from this version; none: it must be sent whole."""
        with self._lock:
            newest, differences = self._newest[fragment], self._differences.get(fragment, [])
            missing = 0 if version is None else newest.update.version - version
            return newest, differences[-missing:] if 0 < missing <= len(differences) else ()


class _Item(NamedTuple):
    """The next message to each of a learner's hosts."""

    header: pb.DownHeader  # without the fields of the payload
    whole: Pieces
    differences: Sequence[Pieces]  # that lead to the whole, and may be sent in its place

    def to(self, cuts: Sequence[Cut] | None) -> tuple[pb.DownHeader, Pieces]:
        """Header and payload for a host that needs these blocks; None: all. Differences are not divided."""
        payload = list(itertools.chain(*self.differences))
        count = len(self.differences)
        if cuts is not None:
            blocks = [block for piece, cut in zip(self.whole, cuts, strict=True) for block in cut.of(piece)]
            if not count or payload_bytes(blocks) < payload_bytes(payload):
                payload, count = blocks, 0
        elif not count:
            payload = list(self.whole)
        header = pb.DownHeader(size=payload_bytes(payload), differences=count)
        header.MergeFrom(self.header)
        return header, payload


class Downlink:
    """The fragments queued for one learner, sent by all of its streams.

    A fragment that is updated or resent while queued is sent once, in its newest version. All hosts of a
    learner get the same versions in the same order, so that their parameters agree.
    """

    def __init__(
        self,
        newest: NewestFragments,
        moved: Callable[[int], None] = lambda size: None,
        hosts: int = 1,
        learner: int = 0,
        timed: Callable[[int, int, float], None] = lambda host, size, seconds: None,
    ) -> None:
        """`moved` is called with the bytes of each fragment before it is sent. `hosts`: their number.

        `timed` is called after an update with the host, its bytes, and the seconds that it took.
        """
        self._learner = learner
        self.throughput = Throughput()  # of welcomes
        self.limit = TokenBucket()
        self._newest, self._moved, self.hosts, self._timed = newest, moved, hosts, timed
        self._items: collections.deque[_Item] = collections.deque()  # which some hosts have not taken yet
        self._first = 0  # number of the first of them
        self._taken = [0] * hosts
        self._change = threading.Lock()
        self.wakeups = Wakeups()  # of the streams, which wait for something to send
        self._welcome = self._step = 0  # incarnation that is being welcomed, and the global step
        self._data = NOTHING_MERGED  # as in the welcome
        self._welcoming: list[int] = []  # fragments of the welcome that are still to be sent
        self._updates: dict[int, None] = {}  # in the order in which they became due
        self._sent: dict[int, int] = {}  # version by fragment
        self.closed = False

    def put(self, message: EventDelivery) -> None:
        """Queues the fragments of a welcome or an update."""
        match message.event:
            case events.UpdateArrived(fragment=p) as update:
                bare, known = dataclasses.replace(update, watermark=NOTHING_MERGED), message.watermarks
                statement = message.statements[0] if message.statements else b""
                self._newest.put(bare, message.fragments[0], message.difference, known.get(p, {}), statement)
                with self._change:
                    self._updates[update.fragment] = None
                self.wakeups.set()
            case events.Welcomed() as event:
                lineages = event.lineages or (0,) * len(event.versions)
                statements = message.statements or (b"",) * len(event.versions)
                told = fragments_with(event), event.versions, event.merged_steps, lineages
                for p, version, step, lineage, pieces, statement in zip(
                    *told, message.fragments, statements, strict=True
                ):
                    update = events.UpdateArrived(p, version, step, lineage=lineage)
                    marks = message.watermarks.get(p, {})
                    self._newest.put(update, pieces, watermarks=marks, statement=statement)
                self._welcome_with(event)

    def _welcome_with(self, event: events.Welcomed) -> None:
        """Queues all fragments of a welcome, in place of what was queued.

        A learner that joins again during its welcome continues to receive that one.
        """
        with self._change:
            if event.incarnation == self._welcome:
                return
            self._welcome, self._step, self._data = event.incarnation, event.step, event.data
            self._welcoming = list(fragments_with(event))
            self._updates.clear()
            self._sent.clear()
        self.wakeups.set()

    def close(self) -> None:
        """Ends the streams."""
        self.limit.close()
        with self._change:
            self.closed = True
        self.wakeups.set()

    def messages(
        self, host: int = 0, needs: Sequence[Sequence[Cut]] | None = None
    ) -> Iterator[bytes | float]:
        """The next messages of one stream of a host: header, chunks of its payload, next header.

        A float is the seconds to wait before the next one, as the link is limited. Ends when there is nothing
        to send now.

        `needs`: by fragment, the blocks of each piece that the host needs; None: all.
        """
        while (item := self._next(host)) is not None:
            header, payload = item.to(None if needs is None else needs[item.header.update.fragment])
            self._moved(header.size)
            begun = time.monotonic()
            yield header.SerializeToString()
            yield from self.limit.delayed(chunks(payload))
            seconds = time.monotonic() - begun
            if header.welcome:
                self.throughput.add(header.size, seconds)
            else:
                self._timed(host, header.size, seconds)
            del item, payload  # while nothing is due, no old version is held

    def _next(self, host: int) -> _Item | None:
        with self._change:
            if self.closed:
                return None
            if self._taken[host] == self._first + len(self._items):
                if len(self._items) == MAX_AHEAD or (item := self._decided()) is None:
                    return None
                self._items.append(item)
            first, item = self._first, self._taken_by(host)
        if self.hosts > 1 and self._first > first:
            self.wakeups.set()  # there is room again
        return item

    def _taken_by(self, host: int) -> _Item:
        item = self._items[self._taken[host] - self._first]
        self._taken[host] += 1
        while self._items and min(self._taken) > self._first:
            self._items.popleft()
            self._first += 1
        return item

    def _decided(self) -> _Item | None:
        """The next message; None: nothing."""
        if self._welcoming:
            return self._item(self._welcoming.pop(0), self._welcome)
        while self._updates:
            fragment = next(iter(self._updates))
            del self._updates[fragment]
            if self._newest.get(fragment).update.version > self._sent.get(fragment, -1):
                return self._item(fragment, 0)
        return None

    def _item(self, fragment: int, welcome: int) -> _Item:
        newest, differences = self._newest.since(fragment, None if welcome else self._sent.get(fragment))
        self._sent[fragment] = newest.update.version
        header = newest.to(self._learner)
        header.welcome, header.step = welcome, self._step
        if welcome:
            header.data.CopyFrom(pb.DownHeader(data=fields_of(self._data)).data)
        return _Item(header, newest.pieces, differences)
