"""A TCP proxy that is a bad network: partitions, latency, jitter, a thin line, losses, broken connections."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import threading
from collections.abc import Coroutine
from typing import Any

from ddiloco.config import setting

_CHUNK = 1 << 16  # bytes read at a time
_PACKET = 1448  # bytes of payload in a TCP segment on an Ethernet
_PATIENCE = 10.0  # seconds for the proxy's thread to answer

Address = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class LinkShape:
    """What a connection through the proxy suffers, in each of its two directions."""

    latency: float = setting(0.0, "seconds one way", at_least=0.0)
    jitter: float = setting(0.0, "seconds more, uniformly from 0; bytes stay in order", at_least=0.0)
    bytes_per_second: float | None = setting(None, "of one connection's direction; None: no bound", above=0.0)
    loss: float = setting(
        0.0,
        "share of packets lost; TCP hides a loss behind a pause, and so does this",
        at_least=0.0,
        below=1.0,
    )
    retransmission: float = setting(0.2, "seconds of the pause after a loss", at_least=0.0)
    broken_every: float | None = setting(
        None, "mean seconds after which a connection is reset; None: none is", above=0.0
    )
    buffer_bytes: int = setting(1 << 22, "on the way in one direction at most", at_least=_CHUNK)


class Pace:
    """When bytes that come into one direction of a connection leave it; reads no clock."""

    def __init__(self, shape: LinkShape, rng: random.Random) -> None:
        self._shape, self._rng = shape, rng
        self._line_free = self._last = -float("inf")

    def due(self, now: float, size: int) -> float:
        """When the last of `size` bytes that came at `now` (seconds) leaves; never before an earlier one."""
        shape = self._shape
        sent = max(now, self._line_free)
        if shape.bytes_per_second is not None:
            sent += size / shape.bytes_per_second
        packets = -(-size // _PACKET)
        if shape.loss and self._rng.random() >= (1 - shape.loss) ** packets:
            sent += shape.retransmission  # what comes behind waits too, as in TCP
        self._line_free = sent
        self._last = max(self._last, sent + shape.latency + shape.jitter * self._rng.random())
        return self._last


class Proxy:
    """Passes connections to `target` on, in one thread; from `start` to `close`, or as a context manager.

    In a partition nothing is passed on in either direction and nothing is closed: it is read until
    `buffer_bytes` are full and held back until `heal`. Connections that are made meanwhile wait too.
    """

    def __init__(
        self, target: Address, shape: LinkShape | None = None, seed: int = 0, host: str = "127.0.0.1"
    ) -> None:
        """Listens on a free port of `host` once started."""
        self.connections = 0  # ever accepted
        self.taken = self.passed = 0  # bytes that came in, and that went out
        self._target, self._host = target, host
        self._shape = shape or LinkShape()
        self._rng = random.Random(f"proxy {seed}")
        self._loop = asyncio.new_event_loop()
        self._whole = asyncio.Event()
        self._tasks: set[asyncio.Task] = set()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    @property
    def address(self) -> Address:
        """Where it listens."""
        if self._server is None:
            raise RuntimeError("the proxy has not been started")
        return self._server.sockets[0].getsockname()[:2]

    def start(self) -> Proxy:
        """Begins to listen; returns itself.

        Raises:
          OSError: no port can be had.
        """
        self._thread.start()
        self._do(self._listen())
        return self

    def partition(self) -> None:
        """From the return of this on no byte is passed, until `heal`."""
        self._do(self._set_whole(False))

    def heal(self) -> None:
        """Passes on what was held back, and all that follows."""
        self._do(self._set_whole(True))

    def shape(self, shape: LinkShape) -> None:
        """Another shape, for connections that are made from now on."""
        self._shape = shape

    def close(self) -> None:
        """Ends all connections and the thread; a second call does nothing."""
        if self._thread.is_alive():
            self._do(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_PATIENCE)
            self._loop.close()

    def __enter__(self) -> Proxy:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _do(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_PATIENCE)

    # In the loop's thread.

    async def _listen(self) -> None:
        self._whole.set()
        self._server = await asyncio.start_server(self._accepted, self._host, 0, limit=_CHUNK)

    async def _set_whole(self, whole: bool) -> None:
        (self._whole.set if whole else self._whole.clear)()

    async def _end(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            await self._connection(reader, writer)
        except asyncio.CancelledError:
            pass  # the proxy is closed: asyncio would report a cancelled connection as an error
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._whole.wait()
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target, limit=_CHUNK)
        except OSError:
            return
        shape = self._shape
        lifetime = None if shape.broken_every is None else self._rng.expovariate(1 / shape.broken_every)
        both = (self._pump(reader, far_writer, shape), self._pump(far_reader, writer, shape))
        try:
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(_all_or_first_error(*both), lifetime)
        finally:
            far_writer.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, shape: LinkShape
    ) -> None:
        """One direction, until its end of file has been passed on."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(shape.buffer_bytes // _CHUNK)
        pace = Pace(shape, self._rng)

        async def take() -> None:
            data = b"more"
            while data:
                data = await reader.read(_CHUNK)
                self.taken += len(data)
                await on_the_way.put((pace.due(self._loop.time(), len(data)), data))

        async def give() -> None:
            data = b"more"
            while data:
                due, data = await on_the_way.get()
                if (wait := due - self._loop.time()) > 0:
                    await asyncio.sleep(wait)
                await self._whole.wait()
                if data:
                    writer.write(data)
                    await writer.drain()
                    self.passed += len(data)
                else:
                    writer.write_eof()

        await _all_or_first_error(take(), give())


async def _all_or_first_error(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Runs them side by side; the first error cancels the others and is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
