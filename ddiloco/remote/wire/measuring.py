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


class MeasuredLink(NamedTuple):
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
        left = probe.up
        while left:
            left = _less(left, await call.read())
        await call.write(pb.Probe(up=probe.up, down=probe.down).SerializeToString())
        for chunk in _noise(probe.down):
            await call.write(chunk)


def measure(address: str, security: Security, size: int, connections: int, timeout: float) -> MeasuredLink:
    """Measures the link to a process that answers probes at HOST:PORT, with so many bytes each way.

    `connections`: at the same time, which share the bytes. `timeout`: seconds until the first answer.

    Raises:
      grpc.RpcError: it cannot be reached, refuses the caller, or does not answer probes.
      WireError: its answer is none.
    """
    options = wire.options(timeout)
    channels = [security.channel(address, options) for _ in range(connections)]
    try:
        for channel in channels:
            _probe(channel, security, 0, 0, timeout)  # connects
        trips = [_probe(channels[0], security, 0, 0, timeout) for _ in range(_ROUND_TRIPS)]
        each = max(CHUNK_BYTES, size // connections)
        with concurrent.futures.ThreadPoolExecutor(connections) as pool:

            def throughput(up: int, down: int) -> float:
                seconds = pool.map(lambda c: _probe(c, security, up, down, _MAX_SECONDS), channels)
                return sum(each / took for took in seconds)

            up, down = throughput(each, 0), throughput(0, each)
        return MeasuredLink(statistics.median(trips), up, down)
    finally:
        for channel in channels:
            channel.close()


def _probe(channel: grpc.Channel, security: Security, up: int, down: int, timeout: float) -> float:
    """Seconds until all has come; raises as `measure`."""

    def messages() -> Iterator[bytes]:
        yield pb.Probe(up=up, down=down).SerializeToString()
        yield from _noise(up)

    begun = time.monotonic()
    call = channel.stream_stream(wire.MEASURE)(messages(), metadata=security.metadata, timeout=timeout)
    answer = parse(pb.Probe, next(call, b""))
    if (answer.up, answer.down) != (up, down):
        raise WireError("another probe")
    _read(down, call)
    return time.monotonic() - begun


def _read(size: int, messages: Iterator[bytes]) -> None:
    while size:
        size = _less(size, next(messages, b""))


def _less(left: int, message: bytes | None) -> int:
    """What is left of so many bytes after a message; raises WireError for none, or too long a one."""
    if not 0 < len(message or b"") <= left:
        raise WireError("probe of another size")
    return left - len(message or b"")


def _noise(size: int) -> Iterator[bytes]:
    """So many bytes that no link can compress."""
    chunk = os.urandom(min(size, CHUNK_BYTES))
    for begun in range(0, size, CHUNK_BYTES):
        yield chunk[: size - begun]
