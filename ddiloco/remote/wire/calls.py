"""Calls as coroutines of one event loop, so that waiting streams take no threads."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio

from ddiloco.remote.wire.security import Security, host_of

T = TypeVar("T")


class EventLoop:
    """A thread that runs coroutines and callbacks; any thread may hand them in."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._waiting: list[Callable[[], object]] = []
        threading.Thread(target=self._loop.run_forever, name="wire", daemon=True).start()

    def run(self, made: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Runs a coroutine, and waits for its result; raises TimeoutError."""
        return asyncio.run_coroutine_threadsafe(made, self._loop).result(timeout)

    def call(self, callback: Callable[[], object]) -> None:
        """Calls it soon. Of many calls at once, as in a broadcast, only the first wakes the thread."""
        with self._lock:
            self._waiting.append(callback)
            first = len(self._waiting) == 1
        if first:
            self._loop.call_soon_threadsafe(self._run_waiting)

    def call_later(self, seconds: float, callback: Callable[[], object]) -> None:
        """Calls it after so many seconds."""
        self.call(lambda: self._loop.call_later(seconds, callback))

    def _run_waiting(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()


@functools.cache
def event_loop() -> EventLoop:
    """The one of this process: gRPC's events of all servers come to it."""
    return EventLoop()


class Wakeup:
    """Wakes one coroutine; any thread may set it."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._is_set = False

    def set(self) -> None:
        """Ends the present wait, or else the next one."""
        if not self._is_set:
            self._is_set = True
            event_loop().call(self._event.set)

    async def wait(self) -> None:
        """Waits until it is set; what was changed before that is seen after it."""
        await self._event.wait()
        self._event.clear()
        self._is_set = False


class Wakeups:
    """Those of all who wait for one thing to change."""

    def __init__(self) -> None:
        self._all: list[Callable[[], object]] = []

    @contextlib.contextmanager
    def added(self, wake: Callable[[], object]) -> Iterator[None]:
        """Calls `wake` at each change as long as the `with` block lasts."""
        self._all = [*self._all, wake]
        try:
            yield
        finally:
            self._all = [one for one in self._all if one is not wake]

    def set(self) -> None:
        """Something has changed."""
        for wake in self._all:
            wake()


class Refused(Exception):
    """The call ends with this code, and a line for the other end."""

    def __init__(self, code: grpc.StatusCode, line: str) -> None:
        super().__init__(line)
        self.code, self.line = code, line


class Call:
    """One call, for its own coroutine; any thread may cancel it.

    A cancelled one ends without a status of the syncer's, which would wait for messages that nobody reads:
    gRPC resets its stream once nothing refers to the call.
    """

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self.context = context
        self._task = asyncio.current_task()

    async def read(self) -> bytes | None:
        """The next message; None: the other end sends no more."""
        message = await self.context.read()
        return None if message is grpc.aio.EOF else message

    async def write(self, message: bytes) -> None:
        """Sends a message; waits while the connection is full."""
        await self.context.write(message)

    def cancel(self) -> None:
        """Ends it from this side."""
        if self._task is not None:
            event_loop().call(self._task.cancel)


async def first_message(call: Call, seconds: float) -> bytes:
    """The first message of a call, empty if there is none; raises Refused if that takes longer."""
    try:
        async with asyncio.timeout(seconds):
            return await call.read() or b""
    except TimeoutError:
        raise Refused(grpc.StatusCode.CANCELLED, f"no message in {seconds:g} s") from None


Handler = Callable[[Call], Awaitable[None]]
Answer = Callable[[Call], Awaitable[bytes]]


class CallServer:
    """A gRPC server whose calls run in the event loop; those without credentials are refused."""

    def __init__(
        self, security: Security, refusal: str, calls: int, options: Sequence[tuple[str, int]]
    ) -> None:
        """`refusal`: a line for callers without credentials. `calls`: that there may be at the same time."""
        self.refused: Callable[[str], None] = lambda host: None  # called for each of these, with its host
        self._security, self._refusal = security, refusal
        self._server = event_loop().run(self._made(calls, options))

    def listen(self, address: str) -> int:
        """Binds HOST:PORT; returns the port. Raises ConfigError: the address is not available."""
        return event_loop().run(self._bound(address))

    def serve(
        self, path: str, handlers: Mapping[str, Handler], answers: Mapping[str, Answer] | None = None
    ) -> None:
        """Answers these calls of the service in `path` from now on; `answers`: those with one message.

        That goes with the call's status, which costs less than a message of its own.
        """
        made = {name: _rpc_handler(handler, self._admit) for name, handler in handlers.items()}
        for name, answer in (answers or {}).items():
            made[name] = _rpc_handler(answer, self._admit, grpc.stream_unary_rpc_method_handler)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(path.split("/")[1], made),)
        )
        event_loop().run(self._server.start())

    def stop(self, grace: float | None) -> None:
        """Releases the port, and ends all calls; running ones after `grace` seconds, None: at once."""
        with contextlib.suppress(TimeoutError):
            event_loop().run(self._server.stop(grace), 5.0)

    async def _made(self, calls: int, options: Sequence[tuple[str, int]]) -> grpc.aio.Server:
        return grpc.aio.server(options=options, maximum_concurrent_rpcs=calls)

    async def _bound(self, address: str) -> int:
        return self._security.listen(self._server, address)

    def _admit(self, context: grpc.aio.ServicerContext) -> None:
        if not self._security.admits(context.invocation_metadata()):
            self.refused(host_of(context.peer()))
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, self._refusal)


def _rpc_handler(
    handler: Handler | Answer,
    admit: Callable[[grpc.aio.ServicerContext], None],
    kind: Callable[..., grpc.RpcMethodHandler] = grpc.stream_stream_rpc_method_handler,
) -> grpc.RpcMethodHandler:
    """The handler for gRPC; `admit` raises Refused for a call that is not to be answered."""

    async def answer(requests: object, context: grpc.aio.ServicerContext) -> bytes | None:
        call = Call(context)
        try:
            admit(context)
            return await handler(call)
        except Refused as refused:
            await context.abort(refused.code, refused.line)
            raise AssertionError("abort has raised") from refused

    return kind(answer)
