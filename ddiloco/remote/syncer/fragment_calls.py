"""The calls in which fragments travel between a learner and who merges them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import grpc
import numpy as np

from ddiloco.observe import records
from ddiloco.outer.blocks import Cut
from ddiloco.protocol import events
from ddiloco.remote.syncer.listening import Handshakes
from ddiloco.remote.syncer.offers import OfferIntake, drop
from ddiloco.remote.syncer.session import Session
from ddiloco.remote.wire import agreement as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.agreement import WireError, parse
from ddiloco.remote.wire.blocks import wanted_cuts
from ddiloco.remote.wire.terms import Terms

TakeOffer = Callable[[events.FragmentArrived, Sequence[np.ndarray], int], None]


class FragmentCalls:
    """Answers Updates and Offers of the learners that have a session; each call in a thread of gRPC's.

    Attributes:
      handshakes: of the server that it answers at; set it before that begins.
    """

    handshakes: Handshakes

    def __init__(
        self,
        terms: Terms,
        find: Callable[[str], Session | None],
        send: Callable[[events.OfferFailed], None],
        take_offer: TakeOffer,
        record: Callable[[object], None],
    ) -> None:
        """`find`: the session of a name. `send`, `take_offer`: those of a SyncerWorker."""
        self._terms, self._find, self._record = terms, find, record
        self._intake = OfferIntake(terms, send, take_offer, record, self.count)
        self.handlers = {
            # Their one request says nothing and is not waited for: a call that sends none costs nothing.
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

    def _updates(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        session = self.session(context)
        with session.call("updates", context) as host, self._seen(session, host):
            needs = None if session.hosts == 1 else self._needs(requests, context)
            yield from session.down.messages(host, needs)

    @contextlib.contextmanager
    def _seen(self, session: Session, host: int) -> Iterator[None]:
        """Records that one of a learner's several hosts is connected as long as the `with` block lasts."""
        values = {"learner": session.learner, "host": host, "hosts": session.hosts}
        if session.hosts > 1:
            self._record(records.Noted("host_here", values, time.time()))
        try:
            yield
        finally:
            if session.hosts > 1:
                self._record(records.Noted("host_gone", values, time.time()))

    def _needs(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> list[list[Cut]]:
        """By fragment, the blocks of each piece that one of a learner's hosts needs."""
        with self.handshakes.one(context):
            first = next(requests, b"")
        try:
            return wanted_cuts(parse(pb.Wanted, first), self._terms.down)
        except WireError as error:
            self.count(None, error)
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def _offers(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        self._intake.take(self.session(context), requests, context)
        return b""
