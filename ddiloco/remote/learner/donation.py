"""Receives inner optimizer states: a peer's header, and its blocks for this host."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ddiloco.arrays.blocks import Blocks, Gathered
from ddiloco.arrays.finite import NotFiniteError, check_state
from ddiloco.remote.learner.inner_format import InnerFormat
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.blocks import cut_message, cuts_of, receive_blocks
from ddiloco.remote.wire.security import Security, is_address
from ddiloco.remote.wire.validation import WireError, parse
from ddiloco.storage.tape.entries import InnerOrigin
from ddiloco.workers.exchange import InnerState


class Recipient(NamedTuple):
    """A host that needs an inner state, with its credentials."""

    inner: InnerFormat  # its format, and the blocks that this host needs
    security: Security  # its credentials
    keepalive: float  # seconds


class Donation:
    """A peer's inner state: first its header, and its arrays only if accepted."""

    def __init__(self, recipient: Recipient, address: str, versions: tuple[int, ...], timeout: float) -> None:
        """Asks the learner at HOST:PORT for its inner state once it has applied these versions.

        `timeout`: seconds until all of it must be here.
        """
        self._recipient, self._address, self._versions = recipient, address, versions
        self.until = time.monotonic() + timeout
        self._call = _Call(recipient, address, pb.DonationRequest(versions=versions), timeout)
        self._header: pb.DonationHeader | None = None

    def open(self) -> Donation:
        """Waits for the peer's header; returns self.

        Raises:
          grpc.RpcError: the peer cannot be reached, or refuses.
          WireError: the state is another optimizer's, or older than asked for.
        """
        self._header = _header(self._call.messages, self._versions, self._recipient.inner)
        return self

    @property
    def trained(self) -> int:
        """Inner steps in the state; 0 before the donation is open."""
        return 0 if self._header is None else self._header.trained

    @property
    def rest(self) -> tuple[int, list[str]]:
        """Of an open donation: the number of the copy that the peer's hosts keep, and their addresses."""
        assert self._header is not None
        return self._header.copy, [self._address, *self._header.hosts]

    def take(self) -> InnerState:
        """The state, of an open donation.

        Raises:
          grpc.RpcError: the peer is lost, or takes too long.
          WireError: the state is incomplete or not finite.
        """
        copy, [_, *others] = self.rest
        taken = _Taken(self._recipient)
        taken.add(self._header, self._call.messages)
        taken.add_copy(others, copy, self.until)
        return taken.state(self._header)

    def close(self) -> None:
        """Ends the call; from any thread."""
        self._call.close()


def fetch_copy(
    recipient: Recipient, addresses: Sequence[str], copy: int, timeout: float
) -> Sequence[np.ndarray | Blocks]:
    """This host's blocks of a copy that a learner's hosts at these HOST:PORT keep; raises as a Donation."""
    taken = _Taken(recipient)
    taken.add_copy(addresses, copy, time.monotonic() + timeout)
    return taken.arrays()


class _Call:
    """A call of a donor, which sends until the call is closed."""

    def __init__(
        self, recipient: Recipient, address: str, request: pb.DonationRequest, timeout: float
    ) -> None:
        inner, security, keepalive = recipient
        request.wanted.extend(map(cut_message, inner.needs))
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._requests.put(request.SerializeToString())
        self._channel = security.peer_channel(address, wire.options(keepalive))
        ask = self._channel.stream_stream(wire.DONATE)
        self.messages = ask(iter(self._requests.get, None), metadata=security.metadata, timeout=timeout)

    def close(self) -> None:
        self._requests.put(None)
        self.messages.cancel()
        self._channel.close()


class _Taken:
    """The received part of a state."""

    def __init__(self, recipient: Recipient) -> None:
        self._recipient, self._inner = recipient, recipient.inner
        formats = zip(self._inner.needs, self._inner.arrays, strict=True)
        self._gathered = [Gathered(cut, form.dtype) for cut, form in formats]

    def add(self, header: pb.DonationHeader, messages: Iterator[bytes]) -> None:
        """Adds one host's part; raises WireError."""
        formats = self._inner.arrays
        cuts = cuts_of(header.arrays, formats)
        if any(cut.shape != form.shape for cut, form in zip(cuts, formats, strict=True)):
            raise WireError("donation of other arrays", "its blocks are of other shapes")
        received = receive_blocks(formats, cuts, header.size, messages)
        for i, (gathered, blocks) in enumerate(zip(self._gathered, received, strict=True)):
            try:
                check_state((f"array {i}", block) for block in blocks.blocks.values())
            except NotFiniteError as error:
                raise WireError("donation not finite", str(error)) from None
            gathered.add(blocks)

    def add_copy(self, addresses: Sequence[str], copy: int, until: float) -> None:
        """Fetches the copy of that number from these hosts until it is complete; `until`: by time.monotonic.

        Raises as `take`.
        """
        for address in addresses:
            if all(gathered.complete for gathered in self._gathered):
                return  # where the meshes are equal, one host has all that its counterpart needs
            request, left = pb.DonationRequest(copy=copy), max(0.0, until - time.monotonic())
            call = _Call(self._recipient, address, request, left)
            try:
                header = _checked(call.messages, self._inner)
                self.add(header, call.messages)
            finally:
                call.close()

    def arrays(self) -> Sequence[np.ndarray | Blocks]:
        """The arrays, as blocks on one host of several; raises WireError if some are missing."""
        try:
            found = [gathered.blocks() for gathered in self._gathered]
        except ValueError as error:
            raise WireError("donation with gaps", str(error)) from None
        return [blocks.all for blocks in found] if self._inner.whole else found

    def state(self, header: pb.DonationHeader) -> InnerState:
        """The state that the header describes."""
        origin = InnerOrigin(header.learner, header.process, header.number) if header.number else None
        return InnerState(header.step, tuple(header.versions), self.arrays(), origin, header.trained)


def _checked(messages: Iterator[bytes], inner: InnerFormat) -> pb.DonationHeader:
    header = parse(pb.DonationHeader, next(messages, b""))
    if header.format != inner.fingerprint:
        raise WireError("another inner optimizer", "its state has other shapes")
    return header


def _header(messages: Iterator[bytes], versions: tuple[int, ...], inner: InnerFormat) -> pb.DonationHeader:
    header = _checked(messages, inner)
    had = tuple(header.versions)
    if len(had) != len(versions) or any(a < b for a, b in zip(had, versions, strict=True)):
        raise WireError("donation of another time", "its versions are not those asked for")
    if len(header.hosts) > wire.MAX_HOSTS or not all(map(is_address, header.hosts)):
        raise WireError("a peer's hosts that are nowhere", f"{len(header.hosts)} of them")
    return header
