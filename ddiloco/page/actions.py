"""What a visitor may have the run do, behind a confirmation and a token.

Each request carries the token of whoever manages the run, which the page neither knows nor keeps. Where a run
has no credentials, and its page is only for this machine, the page has a secret in its place, new at each
start, that no other site can read. So a page of another site can ask for nothing, whatever this browser has
cookies of.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import urllib.parse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ddiloco.page.elements import Html, el

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

    def __init__(self, admits: Callable[[str], bool] | None = None) -> None:
        """`admits`: judges a token, in a time that reveals nothing of it; None: the page has a secret."""
        self._secret = secrets.token_urlsafe(32) if admits is None else None
        self._admits = admits or self._is_secret
        self._do: Do | None = None

    def attach(self, do: Do) -> None:
        """`do` does what is asked, from now on."""
        self._do = do

    def dialog(self) -> Html:
        """The button and the dialog behind it."""
        verb = {"type": "radio", "name": "verb", "required": True}
        whom = {"name": "learner", "type": "number", "min": 0, "step": 1, "id": "whom"}
        token = {"name": "token", "type": "password", "autocomplete": "off", "required": True}
        choices = [
            el("label", el("input", value=name, **verb), f" {name}: {meaning}")
            for name, meaning in (OF_A_LEARNER | OF_ALL).items()
        ]
        form = el(
            "form",
            el("h2", "Manage this run", id="managing-title"),
            el("fieldset", el("legend", "What"), choices),
            el("label", "Learner ", el("input", **whom)),
            None if self._secret else el("label", "Token that manages it ", el("input", **token)),
            el("p", "", id="managed", role="status"),
            el("p", el("button", "Cancel", type="button"), " ", el("button", "Go on", type="submit")),
            data_secret=self._secret,
            data_of_a_learner=" ".join(OF_A_LEARNER),
        )
        button = el("button", "Manage this run", type="button", id="manage", aria_haspopup="dialog")
        return el("aside", button, el("dialog", form, id="managing", aria_labelledby="managing-title"))

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
        return self._secret is not None and hmac.compare_digest(token.encode(), self._secret.encode())


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
