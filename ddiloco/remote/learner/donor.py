"""Inner optimizer states from learner to learner: what a learner that joins takes over from a peer.

Parameters are not taken over. A learner that joins starts from the global fragments: the donor sends its own
steps to the syncer, so that a copy of them would be merged twice.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import queue
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
from ddiloco.remote.wire.security import Security, check_reach
from ddiloco.roles.exchange import Delivery, InnerState, InnerStateWanted
from ddiloco.roles.transfer import host_arrays

BOUNDARY_SECONDS = 20.0  # for the donor to reach a step boundary with the requested versions
AT_ONCE = 1  # donations of one learner at a time; each holds a copy of its inner state
TURN_SECONDS = 2.0  # how long a call waits for the one before: it ends a moment after its peer has everything


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

    def __init__(self, security: Security, keepalive: float, longest: float = 30.0) -> None:
        """Both are in seconds; after `longest` a donation that is not read is given up."""
        self._security, self._longest = security, longest
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Delivery] | None = None
        self._format: InnerFormat | None = None
        handlers = {"Donate": grpc.unary_stream_rpc_method_handler(self._donate)}
        self._server = wire.listener(wire.DONATE, handlers, keepalive, AT_ONCE + 2)
        self._giving = threading.BoundedSemaphore(AT_ONCE)

    def start(self, host: str) -> int:
        """Listens on a free port of this host; returns the port.

        Raises:
          ConfigError: the host is not available, or is beyond the loopback without token and TLS.
        """
        check_reach(f"{host}:0", self._security)
        port = self._security.listen(self._server, f"{host}:0")
        self._server.start()
        return port

    def attach(self, inbox: queue.SimpleQueue[Delivery], inner: InnerFormat) -> None:
        """Names the worker's inbox; until then every request is refused."""
        with self._lock:
            self._inbox, self._format = inbox, inner

    def stop(self) -> None:
        """Ends the donations under way."""
        with self._lock:
            self._inbox = None
        self._server.stop(grace=None).wait(5.0)

    def _donate(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        if not self._security.admits(context.invocation_metadata()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the donor asks for another join token")
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
                format=inner.fingerprint, step=state.step, versions=state.versions, size=payload_bytes(arrays)
            )
            if state.origin is not None:
                origin = state.origin
                header.learner, header.process, header.number = origin.learner, origin.process, origin.number
            yield header.SerializeToString()
            yield from chunks(arrays)

    def _at_boundary(
        self, inbox: queue.SimpleQueue[Delivery], versions: tuple[int, ...], context: grpc.ServicerContext
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
    with security.peer_channel(address, wire.options(keepalive)) as channel:
        request = pb.DonationRequest(versions=versions).SerializeToString()
        stream = channel.unary_stream(wire.DONATE)(request, metadata=security.metadata, timeout=timeout)
        try:
            return read_donation(stream, versions, inner)
        finally:
            stream.cancel()


def read_donation(messages: Iterator[bytes], versions: tuple[int, ...], inner: InnerFormat) -> InnerState:
    """The inner state that a donor sends: its header and its chunks.

    Raises:
      WireError: as `fetch`.
    """
    header = parse(pb.DonationHeader, next(messages, b""))
    if header.format != inner.fingerprint:
        raise WireError("another inner optimizer", "its state has other shapes")
    had = tuple(header.versions)
    short = len(had) != len(versions) or any(a < b for a, b in zip(had, versions, strict=True))
    if short:
        raise WireError("donation of another time", "its versions are not those asked for")
    arrays = receive(inner.arrays, header.size, messages)
    if not all(np.isfinite(a).all() for a in arrays if jnp.issubdtype(a.dtype, jnp.floating)):
        raise WireError("donation not finite")
    origin = InnerOrigin(header.learner, header.process, header.number) if header.number else None
    return InnerState(header.step, had, arrays, origin)
