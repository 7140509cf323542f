"""A TCP proxy between a learner and the syncer, in which partitions are made."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

CHUNK = 1 << 16  # bytes read at a time
_TIMEOUT = 10.0  # seconds for the proxy's thread to answer

Address = tuple[str, int]


class Proxy:
    """Passes connections to `target` on, in one thread; from `start` to `close`, or as a context manager.

    In a partition nothing is passed on in either direction and nothing is closed: it is read until
    `buffer_bytes` are full and held back until `heal`. Connections that are made meanwhile wait too.
    """

    buffer_bytes = 1 << 22  # on the way in one direction at most

    def __init__(self, target: Address) -> None:
        """Listens on a free port of this machine's loopback once started."""
        self.connections = 0  # ever accepted
        self.taken = self.passed = 0  # bytes that came in, and that went out
        self._target = target
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
        """Begins to listen; returns itself. Raises OSError if no port can be had."""
        self._thread.start()
        self._do(self._listen())
        return self

    def partition(self) -> None:
        """From the return of this on no byte is passed, until `heal`."""
        self._do(self._set_whole(False))

    def heal(self) -> None:
        """Passes on what was held back, and all that follows."""
        self._do(self._set_whole(True))

    def close(self) -> None:
        """Ends all connections and the thread; a second call does nothing."""
        if self._thread.is_alive():
            self._do(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_TIMEOUT)
            self._loop.close()

    def __enter__(self) -> Proxy:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def schedule(self) -> Callable[[float, int], float]:
        """For one direction of a connection: from when so many bytes came to when they leave, in seconds."""
        return lambda now, size: now

    def _do(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_TIMEOUT)

    # In the loop's thread.

    async def _listen(self) -> None:
        self._whole.set()
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0, limit=CHUNK)

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
            far_reader, far_writer = await asyncio.open_connection(*self._target, limit=CHUNK)
        except OSError:
            return
        both = self._pump(reader, far_writer), self._pump(far_reader, writer)
        try:
            with contextlib.suppress(OSError):
                await _all_or_first_error(*both)
        finally:
            far_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction, until its end of file has been passed on."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(self.buffer_bytes // CHUNK)
        leaves = self.schedule()

        async def take() -> None:
            data = b"more"
            while data:
                data = await reader.read(CHUNK)
                self.taken += len(data)
                await on_the_way.put((leaves(self._loop.time(), len(data)), data))

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
