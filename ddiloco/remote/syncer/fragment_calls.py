"""The calls that carry fragments between learners and syncer."""

from __future__ import annotations

import asyncio
import concurrent.futures
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
from ddiloco.remote.wire.blocks import block_formats, blocks_of, cuts_of, wanted_cuts
from ddiloco.remote.wire.calls import Answer, Call, Handler, Refused, Wakeup, first_message
from ddiloco.remote.wire.compatibility import Terms
from ddiloco.remote.wire.event_messages import offer_of
from ddiloco.remote.wire.payload import PayloadReader, payload_bytes
from ddiloco.remote.wire.validation import WireError, parse
from ddiloco.settings.remote import HANDSHAKE
from ddiloco.telemetry import records
from ddiloco.telemetry.throughput import TransferRates

MAX_SLEEP = 0.2  # seconds until a stream looks again whether its link is still limited
READERS = 4  # threads that validate offers
READ_AT_ONCE = 64 << 10  # bytes of an offer that is validated on the event loop

TakeOffer = Callable[[events.FragmentArrived, Sequence[np.ndarray]], None]


class FragmentCalls:
    """Answers Updates and Offers of the learners that have a session; a call holds one fragment at most.

    Large offers are validated on threads of their own, beside the event loop.
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
        self._largest = max(sum(part.nbytes for part in form) for each in terms.up for form in each)
        self._reading = concurrent.futures.ThreadPoolExecutor(READERS, "offers")
        self.handlers: dict[str, Handler] = {"Updates": self._updates}
        self.answers: dict[str, Answer] = {"Offers": self._offers}

    def session(self, call: Call) -> Session:
        """The session that a call names; raises Refused if there is none."""
        name = wire.metadata_value(call.context.invocation_metadata(), wire.SESSION_KEY)
        session = self._find(name)
        if session is None:
            raise Refused(grpc.StatusCode.NOT_FOUND, "there is no such session")
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

    async def _updates(self, call: Call) -> None:
        # The one request of a single host is empty and is not waited for: a call without it costs nothing.
        session, changed = self.session(call), Wakeup()
        with (
            session.call("updates", call) as host,
            self._seen(session, host),
            session.down.wakeups.added(changed.set),
        ):
            needs = None if session.hosts == 1 else await self._needs(call)
            while not session.down.closed:
                for message in session.down.messages(host, needs):
                    if isinstance(message, float):
                        await asyncio.sleep(min(message, MAX_SLEEP))
                    else:
                        await call.write(message)
                await changed.wait()

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

    async def _needs(self, call: Call) -> list[list[Cut]]:
        """By fragment, the blocks of each piece that one of a learner's hosts needs."""
        first = await first_message(call, HANDSHAKE)
        try:
            return wanted_cuts(parse(pb.Wanted, first), self._terms.down)
        except WireError as error:
            self.count(None, error)
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None

    async def _offers(self, call: Call) -> bytes:
        """Takes one offer, or one host's part of it; ends the call if it cannot be one."""
        session = self.session(call)
        timeout = session.down.throughput.timeout(self._terms.offer_timeout, self._largest)
        most = session.down.throughput.limit(2 * self._terms.offer_timeout, 2 * self._largest)
        begun = time.monotonic()
        # One that is no longer awaited is ended, whatever deadline it has: it holds up to a fragment.
        with session.call("offers", call) as host:
            offer, arrays = await self._read(session, host, call, most)
        if time.monotonic() - begun > timeout / 2:
            limit = f"{timeout:.0f} s, by sync.offer_timeout"
            sentence = f"learner {session.learner}: an offer took more than half of the {limit}"
            self._record(records.Alarm(sentence, time.time()))
        if arrays is not None and payload_bytes(arrays) < READ_AT_ONCE:
            self._take_offer(offer, arrays)
        elif arrays is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._reading, self._take_offer, offer, arrays)
        return b""

    async def _read(
        self, session: Session, host: int, call: Call, seconds: float
    ) -> tuple[events.FragmentArrived, Sequence[np.ndarray] | None]:
        offer = None
        try:
            async with asyncio.timeout(seconds):
                header = parse(pb.UpHeader, await call.read() or b"")
                offer = self._announced(session, host, header)
                return offer, await self._arrays(session, host, header, offer, call)
        except WireError as error:
            self.count(session.learner, error)
            self._broken(offer, error.reason)
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        except (Exception, asyncio.CancelledError) as error:  # what ends a call, and gRPC's where it breaks
            if offer is not None:
                self._broken(offer, "the transfer broke")
            if isinstance(error, Refused | asyncio.CancelledError):
                raise
            traceback.clear_frames(error.__traceback__)  # gRPC keeps it, and its frames half a fragment
            raise Refused(grpc.StatusCode.CANCELLED, "the transfer broke") from None

    def _announced(self, session: Session, host: int, header: pb.UpHeader) -> events.FragmentArrived:
        """The offer in a header; raises Refused for one that was not requested, or is sent a second time."""
        announced = offer_of(header, session.learner, self._terms.num_fragments)
        if not session.expects(announced.round, host):
            self._record(drop(session.learner, "wire: unawaited fragment"))
            raise Refused(grpc.StatusCode.NOT_FOUND, "nobody waits for this fragment")
        return announced

    async def _arrays(
        self, session: Session, host: int, header: pb.UpHeader, offer: events.FragmentArrived, call: Call
    ) -> Sequence[np.ndarray] | None:
        """The offer's arrays; None: other hosts of the learner have not sent all of their blocks."""
        formats = self._terms.offers(offer.contribution.learner)[offer.round.fragment]
        cuts = None if session.offers is None else cuts_of(header.arrays, formats)
        received = PayloadReader(formats if cuts is None else block_formats(formats, cuts), header.size)
        begun = time.monotonic()
        while received.left:
            received.add(await call.read())
        self.timed(session.learner, "an offer", host, header.size, time.monotonic() - begun)
        if session.offers is None or cuts is None:
            return received.arrays
        return session.offers.add(host, offer, formats, blocks_of(cuts, received.arrays))

    def _broken(self, offer: events.FragmentArrived | None, reason: str) -> None:
        if offer is not None:
            c = offer.contribution
            self._send(events.OfferFailed(offer.round, c.learner, c.incarnation, reason))


def drop(learner: int | None, reason: str) -> records.Noted:
    """Counts something of a learner's that was refused."""
    return records.Noted("drop", {"learner": learner, "reason": reason}, time.time())
