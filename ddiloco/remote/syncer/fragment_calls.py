"""The calls that carry fragments between learners and syncer."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

import grpc
import numpy as np

from ddiloco.arrays.blocks import Cut
from ddiloco.protocol import events
from ddiloco.remote.syncer.session import Session
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.blocks import cuts_of, receive_blocks, wanted_cuts
from ddiloco.remote.wire.compatibility import Terms
from ddiloco.remote.wire.event_messages import offer_of
from ddiloco.remote.wire.payload import receive
from ddiloco.remote.wire.validation import WireError, parse
from ddiloco.settings.remote import HANDSHAKE
from ddiloco.telemetry import records
from ddiloco.telemetry.throughput import TransferRates

TakeOffer = Callable[[events.FragmentArrived, Sequence[np.ndarray]], None]


class FragmentCalls:
    """Answers Updates and Offers of the learners that have a session; each call in a thread of gRPC's.

    A call holds one fragment at most.
    """

    def __init__(
        self,
        terms: Terms,
        find: Callable[[str], Session | None],
        send: Callable[[events.OfferFailed], None],
        take_offer: TakeOffer,
        record: Callable[[object], None],
        shard: int = 0,
    ) -> None:
        """`find`: the session of a name. `send`, `take_offer`: those of a SyncerWorker.

        `shard`: of the syncer; the first one records which of a learner's hosts are connected.
        """
        self._records_hosts = not shard
        self._terms, self._find, self._record = terms, find, record
        self._send, self._take_offer = send, take_offer
        self._rates: dict[tuple[int, str, int], TransferRates] = {}  # by learner, kind and host
        self._largest = max(sum(part.nbytes for part in form) for form in terms.up)
        self.handlers = {
            # Their one request is empty and is not waited for: a call without it costs nothing.
            "Updates": grpc.stream_stream_rpc_method_handler(self._updates),
            "Offers": grpc.stream_unary_rpc_method_handler(self._offers),
        }

    def session(self, context: grpc.ServicerContext) -> Session:
        """The session that a call names; aborts the call if there is none."""
        name = wire.metadata_value(context.invocation_metadata(), wire.SESSION_KEY)
        session = self._find(name)
        if session is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "there is no such session")
        return session

    def count(self, learner: int | None, error: WireError) -> None:
        """Counts something that could not be read, with an alarm if the learner is known."""
        self._record(drop(learner, f"wire: {error.reason}"))
        if learner is not None:
            sentence = f"learner {learner}: what it sent was refused: {error.reason}"
            self._record(records.Alarm(sentence, time.time()))

    def timed(self, learner: int, kind: str, host: int, size: int, seconds: float) -> None:
        """Raises an alarm if a transfer is far slower than those of its kind before."""
        rates = self._rates.setdefault((learner, kind, host), TransferRates())
        if told := rates.add(size, seconds):
            of = f"learner {learner}: {kind}" + (f" of host {host}" if host else "")
            self._record(records.Alarm(f"{of} of {told} (config.remote.interface)", time.time()))

    def _updates(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        session = self.session(context)
        with session.call("updates", context) as host, self._seen(session, host):
            needs = None if session.hosts == 1 else self._needs(requests, context)
            yield from session.down.messages(host, needs)

    @contextlib.contextmanager
    def _seen(self, session: Session, host: int) -> Iterator[None]:
        """Records that one of a learner's several hosts is connected as long as the `with` block lasts."""
        values = {"learner": session.learner, "host": host, "hosts": session.hosts}
        recorded = session.hosts > 1 and self._records_hosts
        if recorded:
            self._record(records.Noted("host_here", values, time.time()))
        try:
            yield
        finally:
            if recorded:
                self._record(records.Noted("host_gone", values, time.time()))

    def _needs(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> list[list[Cut]]:
        """By fragment, the blocks of each piece that one of a learner's hosts needs."""
        with wire.ended_after(HANDSHAKE, context.cancel):
            first = next(requests, b"")
        try:
            return wanted_cuts(parse(pb.Wanted, first), self._terms.down)
        except WireError as error:
            self.count(None, error)
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def _offers(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Takes one offer, or one host's part of it; ends the call if it cannot be one."""
        session = self.session(context)
        timeout = session.down.throughput.timeout(self._terms.offer_timeout, self._largest)
        most = session.down.throughput.limit(2 * self._terms.offer_timeout, 2 * self._largest)
        begun = time.monotonic()
        # One that is no longer awaited is ended, whatever deadline it has: it holds up to a fragment.
        with session.call("offers", context) as host, wire.ended_after(most, context.cancel):
            offer, arrays = self._read(session, host, requests, context)
        if time.monotonic() - begun > timeout / 2:
            limit = f"{timeout:.0f} s, by sync.offer_timeout"
            sentence = f"learner {session.learner}: an offer took more than half of the {limit}"
            self._record(records.Alarm(sentence, time.time()))
        if arrays is not None:
            self._take_offer(offer, arrays)
        return b""

    def _read(
        self, session: Session, host: int, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> tuple[events.FragmentArrived, Sequence[np.ndarray] | None]:
        offer = None
        try:
            header = parse(pb.UpHeader, next(requests, b""))
            announced = offer_of(header, session.learner, self._terms.num_fragments)
            if not session.expects(announced.round, host):  # not requested, or sent a second time
                self._record(drop(session.learner, "wire: unawaited fragment"))
                context.abort(grpc.StatusCode.NOT_FOUND, "nobody waits for this fragment")
            offer = announced
            return offer, self._arrays(session, host, header, offer, requests)
        except WireError as error:
            self.count(session.learner, error)
            self._broken(offer, error.reason)
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception as error:  # gRPC raises bare ones where a stream breaks, or a call was aborted
            if offer is None:
                raise
            traceback.clear_frames(error.__traceback__)  # gRPC keeps it, and its frames half a fragment
            self._broken(offer, "the transfer broke")
            context.abort(grpc.StatusCode.CANCELLED, "the transfer broke")  # gRPC would print an exception
        raise AssertionError("the call was aborted")

    def _arrays(
        self,
        session: Session,
        host: int,
        header: pb.UpHeader,
        offer: events.FragmentArrived,
        requests: Iterator[bytes],
    ) -> Sequence[np.ndarray] | None:
        """The offer's arrays; None: other hosts of the learner have not sent all of their blocks."""
        formats = self._terms.up[offer.round.fragment]
        begun, size = time.monotonic(), header.size
        if session.offers is None:
            arrays = receive(formats, size, requests)
            self.timed(session.learner, "an offer", host, size, time.monotonic() - begun)
            return arrays
        blocks = receive_blocks(formats, cuts_of(header.arrays, formats), size, requests)
        self.timed(session.learner, "an offer", host, size, time.monotonic() - begun)
        return session.offers.add(host, offer, formats, blocks)

    def _broken(self, offer: events.FragmentArrived | None, reason: str) -> None:
        if offer is not None:
            c = offer.contribution
            self._send(events.OfferFailed(offer.round, c.learner, c.incarnation, reason))


def drop(learner: int | None, reason: str) -> records.Noted:
    """Counts something of a learner's that was refused."""
    return records.Noted("drop", {"learner": learner, "reason": reason}, time.time())
