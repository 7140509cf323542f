"""Takes what learners offer: the payload beside its header, whole or in the blocks of several hosts."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence

import grpc
import numpy as np

from ddiloco.observe import records
from ddiloco.protocol import events
from ddiloco.remote.syncer.session import Session
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.agreement import WireError, parse
from ddiloco.remote.wire.blocks import cuts_of, receive_blocks
from ddiloco.remote.wire.event_messages import offer_of
from ddiloco.remote.wire.payload import receive
from ddiloco.remote.wire.terms import Terms
from ddiloco.roles.snapshots.messages import SnapshotMessage


class OfferIntake:
    """Each call runs in a thread of gRPC's, and holds one fragment at most."""

    def __init__(
        self,
        terms: Terms,
        send: Callable[[events.SyncerEvent | SnapshotMessage], None],
        take_offer: Callable[[events.FragmentArrived, Sequence[np.ndarray], int], None],
        record: Callable[[object], None],
        count: Callable[[int, WireError], None],
    ) -> None:
        """`count` hears of what a learner sent and could not be read; the others are a SyncerServer's."""
        self._terms, self._send, self._take_offer = terms, send, take_offer
        self._record, self._count = record, count
        self._largest = max(sum(part.nbytes for part in form) for form in terms.up)

    def take(self, session: Session, requests: Iterator[bytes], context: grpc.ServicerContext) -> None:
        """Takes one offer, or one host's part of it; ends the call if it cannot be one."""
        patience = session.down.pace.patience(self._terms.offer_timeout, self._largest)
        self._check_deadline(session, context, patience)
        begun = time.monotonic()
        with session.call("offers", context) as host:
            offer, epoch, arrays = self._read(session, host, requests, context)
        if time.monotonic() - begun > patience / 2:
            limit = f"{patience:.0f} s, by sync.offer_timeout"
            sentence = f"learner {session.learner}: an offer took more than half of the {limit}"
            self._record(records.Alarm(sentence, time.time()))
        if arrays is not None:
            self._take_offer(offer, arrays, epoch)

    def _read(
        self, session: Session, host: int, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> tuple[events.FragmentArrived, int, Sequence[np.ndarray] | None]:
        offer = None
        try:
            header = parse(pb.UpHeader, next(requests, b""))
            announced = offer_of(header, session.learner, self._terms.num_fragments)
            if not session.expects(announced.round, host):  # nobody asked, or it is sent a second time
                self._record(drop(session.learner, "wire: unawaited fragment"))
                context.abort(grpc.StatusCode.NOT_FOUND, "nobody waits for this fragment")
            offer = announced
            return offer, header.epoch, self._arrays(session, host, header, offer, requests)
        except WireError as error:
            self._count(session.learner, error)
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
        if session.offers is None:
            return receive(formats, header.size, requests)
        blocks = receive_blocks(formats, cuts_of(header.arrays, formats), header.size, requests)
        return session.offers.add(host, offer, formats, blocks)

    def _broken(self, offer: events.FragmentArrived | None, reason: str) -> None:
        if offer is not None:
            c = offer.contribution
            self._send(events.OfferFailed(offer.round, c.learner, c.incarnation, reason))

    def _check_deadline(self, session: Session, context: grpc.ServicerContext, patience: float) -> None:
        """Makes gRPC end a transfer that is no longer awaited: it holds up to a fragment."""
        left = context.time_remaining()
        if left is None or left > 2 * patience:
            self._record(drop(session.learner, "wire: offer without a deadline"))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an offer has a deadline, of the offer timeout")


def drop(learner: int | None, reason: str) -> records.Noted:
    """Counts something of a learner's that was refused."""
    return records.Noted("drop", {"learner": learner, "reason": reason}, time.time())
