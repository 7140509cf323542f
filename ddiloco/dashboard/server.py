"""The page of runs over HTTP: live by server-sent events, a report, the view as JSON, Prometheus' metrics.

One thread reads the runs' files and answers. Until somebody comes it only listens and reads, and imports no
web server. Showing a run takes at most a hundredth of a core: what takes long to show is shown less often.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from ddiloco.dashboard.view import RunView, views_of
from ddiloco.dashboard.visitors import NOBODY, SETTING, Visitors, check_page, context_of, is_loopback, listen
from ddiloco.telemetry.run_files import RunFiles
from ddiloco.telemetry.scalars import as_json

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

EVERY = 2.0  # seconds between two looks, at least
SHARE = 0.01  # of a core that a run gives to looking; ten times that while much is still to be read
READ = 0.1  # seconds at a time for what is new in the files
UNSEEN = 10.0  # seconds between two readings without visitors

COOKIE = "ddiloco_token"
MAX_TOKEN_LENGTH = 1000
_SILENCE = 10.0  # seconds between keep-alives to a visitor
_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_POLICY_OF_ONE_FILE = _POLICY.replace("style-src 'self'", "style-src 'unsafe-inline'")


class Board:
    """The runs of a page, for one thread: files are read a little at a time, pages made when requested."""

    def __init__(self, workdirs: Sequence[pathlib.Path], share: float = SHARE) -> None:
        """`share`: of a core that looking may take."""
        self._runs = [RunFiles(workdir) for workdir in workdirs]
        self._share = share
        self._read_at = 0.0
        self.content = ""
        self._cost = 0.0  # seconds that the last look took

    def read(self) -> bool:
        """Reads new lines of the files, for a moment; returns whether that was all."""
        whole = [run.read(READ) for run in self._runs]
        return all(whole)

    def read_unseen(self) -> float:
        """Reads if it is time to, so that no visitor has to wait for it; returns seconds until it is."""
        if time.monotonic() >= self._read_at:
            begun = time.thread_time()
            whole = self.read()
            pause = self._pause(time.thread_time() - begun, UNSEEN if whole else 0.0)
            self._read_at = time.monotonic() + pause
        return max(0.0, self._read_at - time.monotonic())

    def views(self) -> list[RunView]:
        """The runs as they are now."""
        self.read()
        return views_of(self._runs)

    def look(self) -> bool:
        """Draws what is to be seen; returns whether it differs from before."""
        from ddiloco.dashboard.sheet import content

        begun = time.thread_time()
        before, self.content = self.content, content(self.views(), live=True)
        self._cost = time.thread_time() - begun
        return self.content != before

    @property
    def pause(self) -> float:
        """Seconds until the next look, so that looking takes no more than its share of a core."""
        whole = all(run.whole for run in self._runs)
        return self._pause(self._cost, EVERY if whole else 0.0)

    def _pause(self, spent: float, least: float) -> float:
        """Seconds until as much may be spent again; at least so many, or none while much is to be read."""
        share = self._share if least else min(0.9, 10 * self._share)
        return max(least, spent / share - spent)


class PageServer:
    """Serves the page of some runs from a thread of its own."""

    def __init__(
        self,
        address: str,
        workdirs: Sequence[pathlib.Path],
        visitors: Visitors = NOBODY,
        share: float = SHARE,
        setting: str = SETTING,
    ) -> None:
        """Takes HOST:PORT; on the loopback, which needs no credentials, another port where it is taken.

        `share`: of a core that it may take. `setting`: where the address was given. Raises ConfigError where
        it is not available, or needs credentials that are not there.
        """
        check_page(address, visitors, setting)
        self._host, self._loopback = address.rpartition(":")[0], is_loopback(address)
        self._visitors = NOBODY if self._loopback else visitors
        self._socket = listen(address, setting)
        scheme = "http" if self._visitors.tls is None else "https"
        self.url = f"{scheme}://{self._host}:{self._socket.getsockname()[1]}/"
        self._board = Board(workdirs, share)
        self._changed = asyncio.Event()
        self._watching = 0
        self._over = threading.Event()
        self._wake, self._waked = socket.socketpair()  # so that its end is immediate
        self._thread = threading.Thread(target=self._run, name="page", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Ends the thread, and all visitors' connections; a second call changes nothing."""
        if self._over.is_set():
            return
        self._over.set()
        self._wake.send(b"!")
        if self._thread.ident is not None:
            self._thread.join(timeout)
        for one in (self._socket, self._wake, self._waked):
            one.close()

    def _run(self) -> None:
        pause = 0.0
        while not self._over.is_set():
            ready = connection.wait([self._socket, self._waked], pause)
            if self._socket in ready:
                asyncio.run(self._serve())
                return
            pause = self._board.read_unseen()

    async def _serve(self) -> None:
        import uvicorn

        config = uvicorn.Config(self.app(), log_level="critical", lifespan="off", limit_concurrency=100)
        config.load()
        config.ssl = context_of(self._visitors)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[self._socket]))
        refreshing = asyncio.create_task(self._refresh())
        while not self._over.is_set() and not serving.done():
            await asyncio.sleep(0.2)
        refreshing.cancel()
        server.should_exit = server.force_exit = True
        await asyncio.wait([serving], timeout=3.0)

    async def _refresh(self) -> None:
        while True:
            if not self._watching:
                self._board.read_unseen()
                await asyncio.sleep(0.2)
                continue
            if self._board.look():
                self._changed.set()
                self._changed = asyncio.Event()
            await asyncio.sleep(self._board.pause)

    def app(self) -> Starlette:
        """The application."""
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.responses import HTMLResponse, Response, StreamingResponse
        from starlette.routing import Route

        from ddiloco.dashboard.exposition import exposition
        from ddiloco.dashboard.sheet import document

        def page() -> Response:
            return HTMLResponse(document(self._board.views(), live=True))

        def report() -> Response:
            whole = document(self._board.views(), inline=True)
            return HTMLResponse(whole, headers={"content-security-policy": _POLICY_OF_ONE_FILE})

        def view() -> Response:
            runs = [as_json(dataclasses.asdict(one)) for one in self._board.views()]
            return Response(json.dumps({"runs": runs}), media_type="application/json")

        def metrics() -> Response:
            body, kind = exposition(self._board.views())
            return Response(body, headers={"content-type": kind})

        def events() -> Response:
            return StreamingResponse(self._news(), media_type="text/event-stream")

        made = {"/": page, "/report": report, "/view.json": view, "/metrics": metrics, "/events": events}
        routes = [Route(path, self._guarded(make)) for path, make in made.items()]
        routes += [Route(f"/{name}", _file(name, kind)) for name, kind in _FILES.items()]
        routes.append(Route("/enter", self._enter, methods=["POST"]))
        # On the loopback a page of another site could ask by a name of its own that leads here.
        hosts = ["localhost", "127.0.0.1", "[", self._host] if self._loopback else ["*"]
        return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)])

    def _guarded(self, make: Callable[[], Response]) -> Callable[[Request], Any]:
        """Answers with what is made, or with the question for the token."""
        from starlette.responses import HTMLResponse

        from ddiloco.dashboard.sheet import gate

        async def answer(request: Request) -> Response:
            response = make() if self._admits(request) else HTMLResponse(gate(), status_code=401)
            response.headers.setdefault("content-security-policy", _POLICY)
            response.headers.update(_HEADERS)
            return response

        return answer

    def _admits(self, request: Request) -> bool:
        if self._visitors.admits is None:
            return True
        shown = request.headers.get("authorization", "").removeprefix("Bearer ")
        return self._visitors.admits(shown or request.cookies.get(COOKIE, ""))

    async def _enter(self, request: Request) -> Response:
        """Keeps the token that a visitor typed as a cookie of this page alone."""
        from starlette.responses import Response

        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_TOKEN_LENGTH:
                return Response(status_code=413)
        token = body.decode(errors="replace").strip().removeprefix("token=")
        answer = Response(status_code=303, headers={"location": "."})
        secure = self._visitors.tls is not None
        answer.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=secure)
        return answer

    async def _news(self) -> AsyncIterator[bytes]:
        """The page's content, whenever it has changed."""
        self._watching += 1
        try:
            while not self._over.is_set():
                changed = self._changed
                try:
                    await asyncio.wait_for(changed.wait(), _SILENCE)
                    yield f"data: {json.dumps(self._board.content)}\n\n".encode()
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self._watching -= 1


_FILES = {"page.css": "text/css", "page.js": "text/javascript"}


def _file(name: str, kind: str) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        from starlette.responses import Response

        from ddiloco.dashboard.sheet import asset

        return Response(asset(name), media_type=kind)

    return answer
