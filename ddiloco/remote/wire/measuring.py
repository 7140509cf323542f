"""Measures a link: the time of a round trip, and the throughput each way."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

import grpc

from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.calls import Call, Refused
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.validation import CHUNK_BYTES, WireError, parse

AT_ONCE = 16  # probes that one process answers at a time
MAX_PROBE_BYTES = 1 << 34  # of one probe, each way
_MAX_SECONDS = 120.0  # of one probe
_ROUND_TRIPS = 9


class Link(NamedTuple):
    """What was measured of a link."""

    round_trip: float  # seconds, the median
    up: float  # bytes a second from the caller
    down: float  # bytes a second to it


class Probes:
    """Answers probes."""

    def __init__(self) -> None:
        self._count = 0

    async def answer(self, call: Call) -> None:
        """Reads what the caller sends, and sends what it wants; nothing is kept. Raises Refused."""
        if self._count >= AT_ONCE:
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{AT_ONCE} probes are under way already")
        self._count += 1
        try:
            async with asyncio.timeout(_MAX_SECONDS):
                await self._answer(call)
        except WireError as error:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        except TimeoutError:
            raise Refused(grpc.StatusCode.CANCELLED, "the probe took too long") from None
        finally:
            self._count -= 1

    async def _answer(self, call: Call) -> None:
        probe = parse(pb.Probe, await call.read() or b"")
        if max(probe.up, probe.down) > MAX_PROBE_BYTES:
            raise WireError("too large a probe")
        arriving = _Arriving(probe.up)
        while arriving.left:
            arriving.add(await call.read())
        answer = pb.Probe(up=probe.up, down=probe.down, up_seconds=arriving.seconds)
        await call.write(answer.SerializeToString())
        for chunk in _noise(probe.down):
            await call.write(chunk)


def measure(address: str, security: Security, size: int, connections: int, timeout: float) -> Link:
    """Measures the link to a process that answers probes at HOST:PORT, with so many bytes each way.

    `connections`: at the same time, which share the bytes. `timeout`: seconds until the first answer.

    Raises:
      grpc.RpcError: it cannot be reached, refuses the caller, or does not answer probes.
      WireError: its answer is none.
    """
    options = wire.options(timeout)
    channels = [security.channel(address, options) for _ in range(connections)]
    try:
        trips = []
        for channel in channels:
            _probe(channel, security, 0, 0, timeout)  # connects
        for _ in range(_ROUND_TRIPS):
            begun = time.monotonic()
            _probe(channels[0], security, 0, 0, timeout)
            trips.append(time.monotonic() - begun)
        each = max(2 * CHUNK_BYTES, size // connections)
        with concurrent.futures.ThreadPoolExecutor(connections) as pool:

            def throughput(up: int, down: int) -> float:
                return sum(pool.map(lambda c: _probe(c, security, up, down, _MAX_SECONDS), channels))

            up, down = throughput(each, 0), throughput(0, each)
        return Link(statistics.median(trips), up, down)
    finally:
        for channel in channels:
            channel.close()


def _probe(channel: grpc.Channel, security: Security, up: int, down: int, timeout: float) -> float:
    """Bytes a second of the way that has bytes; raises as `measure`."""

    def messages() -> Iterator[bytes]:
        yield pb.Probe(up=up, down=down).SerializeToString()
        yield from _noise(up)

    call = channel.stream_stream(wire.MEASURE)(messages(), metadata=security.metadata, timeout=timeout)
    answer = parse(pb.Probe, next(call, b""))
    if (answer.up, answer.down) != (up, down):
        raise WireError("another probe")
    seconds = answer.up_seconds if up else _read(down, call)
    return (max(up, down) - CHUNK_BYTES) / max(seconds, 1e-9) if up or down else 0.0


def _read(size: int, messages: Iterator[bytes]) -> float:
    """Reads so many bytes; seconds from the first message to the last. Raises WireError: others came."""
    arriving = _Arriving(size)
    while arriving.left:
        arriving.add(next(messages, None))
    return arriving.seconds


class _Arriving:
    """So many bytes that arrive; `left` have not."""

    def __init__(self, size: int) -> None:
        self.left, self._begun, self._ended = size, 0.0, 0.0

    def add(self, message: bytes | None) -> None:
        """Adds a message; raises WireError for none, or too long a one."""
        self._ended = time.monotonic()
        self._begun = self._begun or self._ended
        self.left -= len(message or b"") or self.left + 1
        if self.left < 0:
            raise WireError("probe of another size")

    @property
    def seconds(self) -> float:
        """From the first message to the last."""
        return self._ended - self._begun


def _noise(size: int) -> Iterator[bytes]:
    """So many bytes that no link can compress."""
    chunk = os.urandom(min(size, CHUNK_BYTES))
    for begun in range(0, size, CHUNK_BYTES):
        yield chunk[: size - begun]
