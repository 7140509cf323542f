"""Sends copies of the inner optimizer state to peers that join.

Parameters are not taken over. A learner that joins starts from the global fragments: the donor sends its own
steps to the syncer, so that a copy of them would be merged twice.

Each host asks for the blocks that it needs, and gets what the donor's host alone answers for. Where one of
the learners is several hosts, the call that found the step boundary is kept open until all hosts have theirs.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

import grpc
import jax
import numpy as np

from ddiloco.arrays.blocks import Cut, owned
from ddiloco.remote.learner.inner_format import InnerFormat
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.blocks import cut_message, cuts_of
from ddiloco.remote.wire.payload import chunks, payload_bytes
from ddiloco.remote.wire.security import Gate, Security, check_reach
from ddiloco.remote.wire.token_bucket import TokenBucket
from ddiloco.remote.wire.validation import WireError, parse
from ddiloco.storage.learner_state import OfAllHosts, new_number
from ddiloco.telemetry.records import reason
from ddiloco.workers.exchange import InnerState, InnerStateWanted
from ddiloco.workers.inbox import Inbox

AT_ONCE = 1  # donations of one learner at a time; each holds a copy of its inner state
MAX_WAITING = 16 + wire.MAX_HOSTS  # further calls: of a peer's hosts, or which wait or are being refused
TURN_SECONDS = 2.0
"""How long a call may take to say what it wants, and waits for the one before, whose peer has everything."""


class Donor:
    """A host's small server for its learner's peers; it asks the worker, which never waits, by its inbox."""

    def __init__(
        self,
        security: Security,
        keepalive: float,
        copies: dict[int, Sequence[jax.Array]] | None = None,
        others: Callable[[], Sequence[str]] = tuple,
        limit: TokenBucket | None = None,
    ) -> None:
        """`keepalive`: seconds. `copies`: what this host has under their numbers; `others`: HOST:PORT of the
        learner's other hosts. `limit`: of the rate of donations; None: no limit."""
        self._limit = limit or TokenBucket()
        self._security = security
        self._copies = {} if copies is None else copies
        self._others = others
        self._lock = threading.Lock()
        self._inbox: Inbox | None = None
        self._format: InnerFormat | None = None
        self._longest = 0.0
        self._boundary: Callable[[], float] = lambda: 0.0
        gate = Gate(lambda metadata: self._security.admits(metadata), "the donor asks for another token")
        self._server = wire.server(keepalive, AT_ONCE + MAX_WAITING, interceptors=[gate])
        self._giving = threading.BoundedSemaphore(AT_ONCE)

    def start(self, host: str, port: int = 0) -> int:
        """Listens on a port of this host, 0: on a free one; returns the port.

        Raises:
          ConfigError: the host is not available, or is beyond the loopback without token and TLS.
        """
        check_reach(f"{host}:0", self._security)
        port = self._security.listen(self._server, f"{host}:{port}")
        handlers = {"Donate": grpc.stream_stream_rpc_method_handler(self._donate)}
        wire.serve(self._server, wire.DONATE, handlers)
        return port

    def admit(self, security: Security) -> None:
        """Sets what peers must show from now on."""
        self._security = security

    def detach(self) -> None:
        """Refuses all requests until `attach` is called again."""
        with self._lock:
            self._inbox = self._format = None

    def attach(
        self,
        inbox: Inbox | None,
        inner: InnerFormat,
        longest: float = 30.0,
        boundary: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Names the worker's inbox; until then every request is refused. None: it is another host's.

        After `longest` seconds a donation that is not read is given up, and one for which the worker finds no
        step boundary after `boundary` more, which its steps may take.
        """
        with self._lock:
            self._inbox, self._format, self._longest, self._boundary = inbox, inner, longest, boundary

    def stop(self) -> None:
        """Ends the donations under way."""
        self.detach()
        self._server.stop(grace=None).wait(5.0)

    def _donate(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with wire.ended_after(TURN_SECONDS, context.cancel):
            request = next(requests, b"")
        try:
            wanted = parse(pb.DonationRequest, request)
        except WireError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        with self._lock:
            inbox, inner = self._inbox, self._format
        if inner is None or (inbox is None and not wanted.copy):
            context.abort(grpc.StatusCode.UNAVAILABLE, "the learner does not step yet")
        try:
            cuts = cuts_of(wanted.wanted, inner.arrays)
        except WireError:  # it has another optimizer, and will see that it has
            with wire.ended_after(self._longest, context.cancel):
                yield pb.DonationHeader(format=inner.fingerprint).SerializeToString()
            return
        if wanted.copy:
            yield from self._rest(wanted.copy, cuts, inner, context)
            return
        if not self._giving.acquire(timeout=TURN_SECONDS):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the learner is giving to another")
        with contextlib.ExitStack() as stack:
            stack.callback(self._giving.release)
            state = self._at_boundary(inbox, tuple(wanted.versions), context)
            copy = state.arrays.number if isinstance(state.arrays, OfAllHosts) else new_number()
            self._copies[copy] = state.arrays
            stack.callback(self._copies.pop, copy, None)
            header = pb.DonationHeader(
                step=state.step, versions=state.versions, trained=state.trained, copy=copy
            )
            header.hosts.extend(self._others())
            if state.origin is not None:
                origin = state.origin
                header.learner, header.process, header.number = origin.learner, origin.process, origin.number
            messages = _messages(header, state.arrays, cuts, inner)
            stack.enter_context(wire.ended_after(self._longest, context.cancel))
            yield from self._limit.limited(messages)
            with contextlib.suppress(Exception):  # gRPC raises bare Exceptions where a stream breaks
                next(requests, None)  # until the peer's hosts have theirs, too

    def _rest(
        self, copy: int, cuts: Sequence[Cut], inner: InnerFormat, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """The result of another call."""
        arrays = self._copies.get(copy)
        if arrays is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "there is no such copy of the inner state")
        with wire.ended_after(self._longest, context.cancel):
            yield from self._limit.limited(_messages(pb.DonationHeader(), arrays, cuts, inner))

    def _at_boundary(
        self, inbox: Inbox, versions: tuple[int, ...], context: grpc.ServicerContext
    ) -> InnerState:
        answer: concurrent.futures.Future[InnerState] = concurrent.futures.Future()
        inbox.put(InnerStateWanted(versions, answer))
        if not context.add_callback(answer.cancel):
            answer.cancel()
        try:
            return answer.result(self._longest + self._boundary())
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            answer.cancel()
            context.abort(grpc.StatusCode.UNAVAILABLE, "the learner does not come to such a boundary")
        except Exception as error:  # of the devices: there is no copy
            context.abort(grpc.StatusCode.UNAVAILABLE, reason(error))


def _messages(
    header: pb.DonationHeader,
    arrays: Sequence[np.ndarray | jax.Array],
    cuts: Sequence[Cut],
    inner: InnerFormat,
) -> Iterator[bytes]:
    """The header, and what this host alone answers for of the blocks; waits until the devices have it."""
    parts = [owned(array).within(cut) for array, cut in zip(arrays, cuts, strict=True)]
    blocks = [block for part in parts for block in part.blocks.values()]
    header.format, header.size = inner.fingerprint, payload_bytes(blocks)
    header.arrays.extend(cut_message(part.cut) for part in parts)
    return itertools.chain([header.SerializeToString()], chunks(blocks))
