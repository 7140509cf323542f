"""What a visitor may have the run do, behind a confirmation and a token.

Each request carries the token of whoever manages the run, which the page neither knows nor keeps. Where a run
has no credentials, and its page is only for this machine, the page has a secret in its place, new at each
start, that no other site can read. So a page of another site can ask for nothing, whatever this browser has
cookies for.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import urllib.parse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

LONGEST = 4096  # bytes of a request
OF_A_LEARNER = {
    "drain": "it ends after its step, and is sent away until it is added again",
    "evict": "it is dropped at once, as one whose process does not react; it may come back",
}
OF_ALL = {
    "snapshot": "one is taken now, where any are",
    "stop": "the run ends for all, with everything saved",
}


class Answer(Protocol):
    """What was done, or why it was not, in a line."""

    done: bool
    line: str


Do = Callable[[str, int | None, str], Answer]
"""(what, which learner, the host that asks) -> what was done."""


class Actions:
    """Judges who asks, and passes on what is asked."""

    of_a_learner = tuple(OF_A_LEARNER)
    meanings = OF_A_LEARNER | OF_ALL

    def __init__(self, admits: Callable[[str], bool] | None = None) -> None:
        """`admits`: judges a token, in a time that reveals nothing of it; None: the page has a secret."""
        self.secret = secrets.token_urlsafe(32) if admits is None else None
        self._admits = admits or self._is_secret
        self._do: Do | None = None

    def attach(self, do: Do) -> None:
        """`do` does what is asked, from now on."""
        self._do = do

    async def answer(self, request: Request) -> Response:
        """Does what the request asks for, or says why not, in JSON: `done`, and a `line`."""
        from starlette.responses import JSONResponse

        def told(status: int, line: str, done: bool = False) -> Response:
            return JSONResponse({"done": done, "line": line}, status, {"cache-control": "no-store"})

        origin = request.headers.get("origin")
        if origin is not None and urllib.parse.urlsplit(origin).netloc != request.headers.get("host"):
            return told(403, "another site asks")
        # No form of another site can send that type.
        if request.headers.get("content-type") != "application/json":
            return told(415, "a request is application/json")
        body = await read_body(request, LONGEST)
        if body is None:
            return told(413, "a request is short")
        found = _read(body)
        if found is None:
            return told(400, "a request has verb, token and, for drain and evict, a learner's number")
        verb, learner, token = found
        if not self._admits(token):
            return told(403, "this is not the token that manages the run")
        if self._do is None:
            return told(503, "the run has not begun yet")
        host = request.client.host if request.client else "an unknown host"
        answer = await asyncio.to_thread(self._do, verb, learner, host)
        return told(200 if answer.done else 409, answer.line, answer.done)

    def _is_secret(self, token: str) -> bool:
        return self.secret is not None and hmac.compare_digest(token.encode(), self.secret.encode())


async def read_body(request: Request, most: int) -> bytes | None:
    """What was sent; None where it is longer than so many bytes."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > most:
            return None
    return body


def _read(body: bytes) -> tuple[str, int | None, str] | None:
    """What is asked, of which learner, and the token; None: it cannot be read."""
    try:
        values: Any = json.loads(body)
        verb, learner, token = values["verb"], values.get("learner"), values["token"]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    whole = isinstance(learner, int) and not isinstance(learner, bool) and learner >= 0
    fits = whole if verb in [*OF_A_LEARNER] else verb in [*OF_ALL] and learner is None
    return (verb, learner, token) if fits and isinstance(token, str) else None
