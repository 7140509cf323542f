"""A host's fragments on the wire: updates from the syncer, offers to it, a thread for each by channel."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import grpc
import numpy as np

from ddiloco.arrays.blocks import Blocks, Box, Cut, slices
from ddiloco.outer.encoding import FragmentDecoder
from ddiloco.protocol import events
from ddiloco.protocol.messages import NO_RECEIPT, NOTHING_MERGED, Contribution, RoundId
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.blocks import cut_message, receive_blocks
from ddiloco.remote.wire.compatibility import Terms
from ddiloco.remote.wire.event_messages import up_header, update_of
from ddiloco.remote.wire.payload import chunks, payload_bytes, receive
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.token_bucket import TokenBucket
from ddiloco.remote.wire.validation import MAX_DIFFERENCES, WireError, parse
from ddiloco.schema import codec
from ddiloco.settings.remote import RemoteConfig
from ddiloco.telemetry.throughput import Throughput
from ddiloco.workers.exchange import EventDelivery, Pieces
from ddiloco.workers.transfer import Offer

if TYPE_CHECKING:
    from ddiloco.remote.learner.receipts import LearnerReceipts

_ENDING = 5.0  # seconds at most for threads to leave calls that were cancelled


def wait_for(threads: Iterable[threading.Thread]) -> None:
    """Waits until they have left gRPC's code, where the interpreter's end would abort the process."""
    end = time.monotonic() + _ENDING
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))


class Host(NamedTuple):
    """One of the hosts that a learner is.

    Attributes:
      number: from 0.
      needs: by fragment, the blocks of each piece that its devices hold.
    """

    number: int
    needs: Sequence[Sequence[Cut]]


@dataclasses.dataclass(frozen=True)
class HostWire:
    """What a host of a learner has for its connections to all shards of the syncer.

    Attributes:
      decode: of updates sent as differences; None: none are.
      host: None where the learner is a single one.
      receipts: signs offers; None: nobody does.
      limit: of the rate of what the host sends, which an operator sets.
    """

    terms: Terms
    security: Security
    config: RemoteConfig
    decode: FragmentDecoder | None = None
    host: Host | None = None
    receipts: LearnerReceipts | None = None
    limit: TokenBucket = dataclasses.field(default_factory=TokenBucket)

    def channel(self, address: str) -> grpc.Channel:
        """A channel to a shard."""
        return self.security.channel(address, wire.options(self.config.keepalive))


class _Offer(NamedTuple):
    """A learner's offer for a round."""

    round: RoundId
    contribution: Contribution
    offer: Offer


class _Offers:
    """Offers on their way out, oldest first; one that an update has made worthless is not sent."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._waiting: dict[int, _Offer] = {}  # by fragment
        self._closed = False

    def put(self, offer: _Offer) -> None:
        """Queues an offer, in place of the fragment's last one."""
        with self._change:
            self._waiting[offer.round.fragment] = offer
            self._change.notify()

    def forget(self, fragment: int, version: int) -> None:
        """Drops the fragment's offer if it was made on an older version than this."""
        with self._change:
            waiting = self._waiting.get(fragment)
            if waiting is not None and waiting.contribution.version < version:
                del self._waiting[fragment]

    def take(self) -> _Offer | None:
        """The oldest, once there is one; None: closed."""
        with self._change:
            while not self._waiting and not self._closed:
                self._change.wait()
            return None if self._closed else self._waiting.pop(next(iter(self._waiting)))

    def __len__(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        """Drops all of them, for good."""
        with self._change:
            self._closed = True
            self._change.notify_all()


class HeldVersions:
    """The versions that came over one connection, to which later differences are added. For several threads.

    Streams beside each other may bring the differences of a fragment out of order.
    """

    def __init__(self, decode: Callable[[int, Pieces, Pieces], Pieces]) -> None:
        """`decode`: makes the next version of fragment, difference and version."""
        self._decode = decode
        self._change = threading.Condition()
        self._versions: dict[int, tuple[int, Pieces]] = {}
        self._closed = False

    def hold(self, fragment: int, version: int, pieces: Pieces) -> None:
        """Stores a whole version, unless a newer one has arrived."""
        with self._change:
            if version >= self._versions.get(fragment, (0, ()))[0]:
                self._versions[fragment] = version, pieces
                self._change.notify_all()

    def after(self, fragment: int, version: int, differences: Sequence[Pieces]) -> Pieces | None:
        """The version that these differences lead to; waits for the one that they begin with.

        None: one as new or newer came meanwhile, or the connection has ended.
        """
        with self._change:
            first = version - len(differences)
            self._change.wait_for(lambda: self._closed or self._versions.get(fragment, (-1, ()))[0] >= first)
            if self._closed:
                return None
            at, pieces = self._versions[fragment]
        if at >= version:
            return None
        for difference in differences[at - first :]:
            pieces = self._decode(fragment, difference, pieces)
        self.hold(fragment, version, pieces)
        return pieces

    def close(self) -> None:
        """Nobody waits any longer."""
        with self._change:
            self._closed = True
            self._change.notify_all()


class Collector:
    """Delivers a shard's updates, and welcomes once all of their fragments are here. For several threads."""

    def __init__(
        self, fragments: Sequence[int], deliver: Callable[[EventDelivery], None], shard: int = 0
    ) -> None:
        """`fragments`: those of the shard."""
        self._fragments, self.shard = tuple(fragments), shard
        self._lock = threading.Lock()
        self._welcome = 0
        self._collected: dict[int, tuple[events.UpdateArrived, Pieces]] = {}
        self._data = NOTHING_MERGED  # the furthest work in the welcome
        self._later: dict[int, EventDelivery] = {}  # by collected fragment, its newest update
        self._deliver = deliver

    def take(self, header: pb.DownHeader, update: events.UpdateArrived, pieces: Pieces) -> None:
        """Takes a fragment; an unfinished older welcome is dropped.

        An update that another stream brings before the welcome is complete waits for that: before it a
        learner has no use for updates, and the shard takes it for sent.

        Raises:
          WireError: the fragment is another shard's.
        """
        if update.fragment not in self._fragments:
            raise WireError("another fragment", f"{update.fragment} from shard {self.shard}")
        told = EventDelivery(update, (pieces,))
        with self._lock:
            if not header.welcome:
                if update.fragment not in self._collected:
                    self._deliver(told)
                elif update.version > self._newest(update.fragment).version:
                    self._later[update.fragment] = told
                return
            if header.welcome < self._welcome:
                return
            if header.welcome > self._welcome:
                self._welcome, self._collected, self._data = header.welcome, {}, NOTHING_MERGED
            self._collected[update.fragment] = update, pieces
            self._data = max(self._data, codec.read(header.data))
            self._later.pop(update.fragment, None)
            if len(self._collected) == len(self._fragments):
                self._complete(header)

    def _newest(self, fragment: int) -> events.UpdateArrived:
        later = self._later.get(fragment)
        return self._collected[fragment][0] if later is None else later.event

    def _complete(self, header: pb.DownHeader) -> None:
        """Delivers the welcome, then what came after some of it."""
        collected = [self._collected[p] for p in self._fragments]
        later, self._collected, self._later = self._later, {}, {}
        updates = [update for update, _ in collected]
        marks = [update.watermark for update in updates]
        event = events.Welcomed(
            header.welcome,
            max(header.step, *(update.step for update in updates)),
            tuple(update.version for update in updates),
            tuple(update.step for update in updates),
            fragments=self._fragments,
            lineages=tuple(update.lineage for update in updates),
            watermarks=tuple(marks) if any(mark.life for mark in marks) else (),
            data=self._data,
            shard=self.shard,
        )
        self._deliver(EventDelivery(event, [pieces for _, pieces in collected]))
        for told in later.values():
            self._deliver(told)


class Streams:
    """Updates and offers of one host over one connection of its learner, from when it is made to `close`."""

    def __init__(
        self,
        own: HostWire,
        channels: Sequence[grpc.Channel],
        session: str,
        collector: Collector,
        failed: Callable[[events.OfferFailed], None],
        broke: Callable[[Exception], None],
        throughput: Throughput,
    ) -> None:
        """`collector` takes welcomes and updates, `failed` offers that the devices could not give.

        `session`: the connection's name; `broke`: called with the reason for the end of updates;
        `throughput`: that of welcomes.
        """
        self._receipts, self._limit = own.receipts, own.limit
        named = () if own.host is None else ((wire.HOST_KEY, str(own.host.number)),)
        self._metadata = (*own.security.metadata, (wire.SESSION_KEY, session), *named)
        self._terms, self._host = own.terms, own.host
        self._failed, self._broke = failed, broke
        self._collector = collector
        decode = own.decode
        if decode is not None and own.host is not None:
            decode = _in_blocks(decode, own.terms)
        self._held = None if decode is None else HeldVersions(decode)
        self._offers = _Offers()
        self._channels, self._throughput = channels, throughput
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begins to take updates, and to send offers."""
        for channel in self._channels:
            for target in (self._take_updates, self._send_offers):
                one = threading.Thread(target=target, args=(channel,), name="fragments", daemon=True)
                self._threads.append(one)
                one.start()

    @property
    def waiting(self) -> int:
        """The number of offers that no stream has taken yet."""
        return len(self._offers)

    def send(self, round_id: RoundId, contribution: Contribution, offer: Offer) -> None:
        """Sends an offer; never waits."""
        self._offers.put(_Offer(round_id, contribution, offer))

    def close(self) -> None:
        """Ends the threads."""
        self._offers.close()
        if self._held is not None:
            self._held.close()
        for channel in self._channels:
            channel.close()
        wait_for(self._threads)

    def _take_updates(self, channel: grpc.Channel) -> None:
        try:
            stream = channel.unary_stream(wire.UPDATES)(self._wanted(), metadata=self._metadata)
            while (data := next(stream, None)) is not None:
                header = parse(pb.DownHeader, data)
                update = update_of(header, self._terms.num_fragments)
                if not header.welcome:
                    self._offers.forget(update.fragment, update.version)
                begun = time.monotonic()
                pieces = self._receive(header, update, stream)
                if header.welcome:
                    self._throughput.add(header.size, time.monotonic() - begun)
                if pieces is not None:
                    if self._receipts is not None:
                        self._receipts.check(self._collector.shard, update, header.statement, pieces)
                    self._collector.take(header, update, pieces)
                del pieces  # while nothing comes, no old version is held
        except Exception as error:  # of memory too: a learner that steps without updates would look alive
            self._broke(error)

    def _wanted(self) -> bytes:
        if self._host is None:
            return b""
        cuts = [cut_message(cut) for fragment in self._host.needs for cut in fragment]
        return pb.Wanted(arrays=cuts).SerializeToString()

    def _receive(
        self, header: pb.DownHeader, update: events.UpdateArrived, stream: Iterator[bytes]
    ) -> Pieces | None:
        """The version that an update leads to; None: a newer one is here already, or the connection ended."""
        p, count = update.fragment, header.differences
        if not count:
            pieces = self._receive_version(p, header.size, stream)
            if self._held is not None:
                self._held.hold(p, update.version, pieces)
            return pieces
        if self._held is None or not count <= min(update.version, MAX_DIFFERENCES):
            raise WireError("differences that were not requested", f"{count} to version {update.version}")
        form = self._terms.difference[p]
        arrays = receive([*form] * count, header.size, stream)
        differences = [arrays[i : i + len(form)] for i in range(0, len(arrays), len(form))]
        return self._held.after(p, update.version, differences)

    def _receive_version(self, fragment: int, size: int, stream: Iterator[bytes]) -> Pieces:
        form = self._terms.down[fragment]
        if self._host is None:
            return receive(form, size, stream)
        return receive_blocks(form, self._host.needs[fragment], size, stream)

    def _send_offers(self, channel: grpc.Channel) -> None:
        send = channel.stream_unary(wire.OFFERS)
        while (offer := self._offers.take()) is not None:
            try:
                self._send(send, offer)
            except grpc.RpcError:  # the syncer knows: it refused the offer, or the transfer broke
                pass
            except ValueError:  # the channel is closed
                return
            except Exception as error:  # of the devices, as their memory is read
                c, reason = offer.contribution, f"{type(error).__name__}: {error}"
                self._failed(events.OfferFailed(offer.round, c.learner, c.incarnation, reason))

    def _send(self, send: grpc.StreamUnaryMultiCallable, offer: _Offer) -> None:
        cuts: list[pb.Cut] = []
        if self._host is None:
            arrays = offer.offer.on_host()
        else:
            parts = offer.offer.own_blocks()
            arrays = tuple(block for part in parts for block in part.blocks.values())
            cuts = [cut_message(part.cut) for part in parts]
        which = offer.round, offer.contribution
        receipt = NO_RECEIPT
        if self._receipts is not None:
            receipt = self._receipts.sign(self._collector.shard, *which, arrays)
        header = up_header(*which, payload_bytes(arrays), receipt)
        header.arrays.extend(cuts)

        def messages() -> Iterator[bytes]:
            yield header.SerializeToString()
            yield from self._limit.limited(chunks(arrays))

        limit = self._throughput.limit(self._terms.offer_timeout, header.size)
        send(messages(), metadata=self._metadata, timeout=limit)


def _in_blocks(decode: FragmentDecoder, terms: Terms) -> Callable[[int, Pieces, Pieces], Pieces]:
    """Makes the next version of blocks: codecs decode a whole difference, not blocks."""

    def after(fragment: int, difference: Pieces, blocks: Sequence[Blocks]) -> Pieces:
        zeros = [np.zeros(form.shape, form.dtype) for form in terms.down[fragment]]
        changes = decode(fragment, difference, zeros)

        def changed(blocks: Blocks, change: np.ndarray) -> Blocks:
            def add(box: Box, block: np.ndarray) -> np.ndarray:
                return block + change[slices(box)]

            return blocks.map(add)

        return [changed(*both) for both in zip(blocks, changes, strict=True)]

    return after
