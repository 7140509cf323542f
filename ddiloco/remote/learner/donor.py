"""Inner optimizer states from learner to learner: what a learner that joins takes over from a peer.

Parameters are not taken over. A learner that joins starts from the global fragments: the donor sends its own
steps to the syncer, so that a copy of them would be merged twice.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Sequence

import grpc
import jax
import jax.numpy as jnp
import numpy as np

from ddiloco.disk.tape.entries import InnerOrigin
from ddiloco.outer.codecs import ArrayFormat
from ddiloco.remote.wire import agreement as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.agreement import WireError, parse
from ddiloco.remote.wire.payload import chunks, payload_bytes, receive
from ddiloco.remote.wire.security import Gate, Security, check_reach
from ddiloco.roles.exchange import InnerState, InnerStateWanted
from ddiloco.roles.inbox import Inbox
from ddiloco.roles.transfer import host_arrays

BOUNDARY_SECONDS = 20.0  # for the donor to reach a step boundary with the requested versions
AT_ONCE = 1  # donations of one learner at a time; each holds a copy of its inner state
MOST_WAITING = 16  # further calls, that wait for their turn or are being refused
TURN_SECONDS = 2.0
"""How long a call may take to say what it wants, and waits for the one before, whose peer has everything."""


class InnerFormat:
    """Shapes and dtypes of an inner optimizer's state, and a fingerprint of them."""

    def __init__(self, leaves: Sequence[jax.ShapeDtypeStruct]) -> None:
        """`leaves`: those of a TrainProgram."""
        self.arrays = tuple(ArrayFormat(tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves)
        formats = [[a.dtype.name, list(a.shape)] for a in self.arrays]
        self.fingerprint = hashlib.sha256(json.dumps(formats).encode()).hexdigest()
        self.bytes = sum(a.nbytes for a in self.arrays)


class Donor:
    """A learner's small server for its peers; the worker is asked through its inbox and never waits."""

    def __init__(self, security: Security, keepalive: float) -> None:
        """`keepalive`: seconds."""
        self._security = security
        self._lock = threading.Lock()
        self._inbox: Inbox | None = None
        self._format: InnerFormat | None = None
        self._longest = 0.0
        gate = Gate(lambda metadata: self._security.admits(metadata), "the donor asks for another token")
        self._server = wire.server(keepalive, AT_ONCE + MOST_WAITING, interceptors=[gate])
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

    def attach(self, inbox: Inbox, inner: InnerFormat, longest: float = 30.0) -> None:
        """Names the worker's inbox; until then every request is refused.

        After `longest` seconds a donation that is not read is given up.
        """
        with self._lock:
            self._inbox, self._format, self._longest = inbox, inner, longest

    def stop(self) -> None:
        """Ends the donations under way."""
        with self._lock:
            self._inbox = None
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
        if inbox is None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the learner does not step yet")
        if not self._giving.acquire(timeout=TURN_SECONDS):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the learner is giving to another")
        with contextlib.ExitStack() as stack:
            stack.callback(self._giving.release)
            stack.enter_context(wire.ended_after(self._longest, context.cancel))
            state = self._at_boundary(inbox, tuple(wanted.versions), context)
            arrays = host_arrays(state.arrays)
            header = pb.DonationHeader(
                format=inner.fingerprint,
                step=state.step,
                versions=state.versions,
                size=payload_bytes(arrays),
                trained=state.trained,
            )
            if state.origin is not None:
                origin = state.origin
                header.learner, header.process, header.number = origin.learner, origin.process, origin.number
            yield header.SerializeToString()
            yield from chunks(arrays)

    def _at_boundary(
        self, inbox: Inbox, versions: tuple[int, ...], context: grpc.ServicerContext
    ) -> InnerState:
        answer: concurrent.futures.Future[InnerState] = concurrent.futures.Future()
        inbox.put(InnerStateWanted(versions, answer))
        if not context.add_callback(answer.cancel):
            answer.cancel()
        try:
            return answer.result(BOUNDARY_SECONDS)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            answer.cancel()
            context.abort(grpc.StatusCode.UNAVAILABLE, "the learner does not come to such a boundary")


class Gift:
    """What a peer has to give: first what it is, and its arrays only if it is taken."""

    def __init__(
        self,
        address: str,
        versions: tuple[int, ...],
        inner: InnerFormat,
        security: Security,
        keepalive: float,
        timeout: float,
    ) -> None:
        """Asks the learner at HOST:PORT for its inner state once it has applied these versions.

        `timeout`: seconds until all of it must be here.
        """
        self._versions, self._inner = versions, inner
        self._channel = security.peer_channel(address, wire.options(keepalive))
        request = pb.DonationRequest(versions=versions).SerializeToString()
        ask = self._channel.unary_stream(wire.DONATE)
        self._stream = ask(request, metadata=security.metadata, timeout=timeout)
        self._header: pb.DonationHeader | None = None

    def open(self) -> Gift:
        """Waits for the peer to say what it gives; returns this.

        Raises:
          grpc.RpcError: it cannot be reached, or does not give.
          WireError: what it gives is another optimizer's or of another time.
        """
        self._header = _header(self._stream, self._versions, self._inner)
        return self

    @property
    def trained(self) -> int:
        """Steps that the state has taken in; 0 before it is open."""
        return 0 if self._header is None else self._header.trained

    def take(self) -> InnerState:
        """The state, of a gift that is open; raises as `fetch` does."""
        return _state(self._header, self._stream, self._inner)

    def close(self) -> None:
        """Lets go of the peer, from any thread."""
        self._stream.cancel()
        self._channel.close()


def fetch(
    address: str,
    versions: tuple[int, ...],
    inner: InnerFormat,
    security: Security,
    keepalive: float,
    timeout: float,
) -> InnerState:
    """The inner state of the learner at HOST:PORT, once it has applied these versions.

    Raises:
      grpc.RpcError: the peer cannot be reached, does not give, or takes longer than `timeout` seconds.
      WireError: what it gives is another optimizer's, is cut short, or holds a number that is not finite.
    """
    gift = Gift(address, versions, inner, security, keepalive, timeout)
    try:
        return gift.open().take()
    finally:
        gift.close()


def read_donation(messages: Iterator[bytes], versions: tuple[int, ...], inner: InnerFormat) -> InnerState:
    """The inner state that a donor sends: its header and its chunks.

    Raises:
      WireError: as `fetch`.
    """
    return _state(_header(messages, versions, inner), messages, inner)


def _header(messages: Iterator[bytes], versions: tuple[int, ...], inner: InnerFormat) -> pb.DonationHeader:
    header = parse(pb.DonationHeader, next(messages, b""))
    if header.format != inner.fingerprint:
        raise WireError("another inner optimizer", "its state has other shapes")
    had = tuple(header.versions)
    if len(had) != len(versions) or any(a < b for a, b in zip(had, versions, strict=True)):
        raise WireError("donation of another time", "its versions are not those asked for")
    return header


def _state(header: pb.DonationHeader, messages: Iterator[bytes], inner: InnerFormat) -> InnerState:
    arrays = receive(inner.arrays, header.size, messages)
    if not all(np.isfinite(a).all() for a in arrays if jnp.issubdtype(a.dtype, jnp.floating)):
        raise WireError("donation not finite")
    origin = InnerOrigin(header.learner, header.process, header.number) if header.number else None
    return InnerState(header.step, tuple(header.versions), arrays, origin, header.trained)
