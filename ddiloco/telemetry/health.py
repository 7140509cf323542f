"""Answers the probes of an engine over HTTP: whether a process lives, and whether it is ready."""

from __future__ import annotations

import collections
import http.server
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from ddiloco.config import ConfigError
from ddiloco.goodput.accounting import State
from ddiloco.telemetry.records import StateChanged, StepDone

SLOWEST = 10.0  # times the median of the last steps
SHORTEST = 600.0  # seconds without a step that mean nothing yet to an engine


class Health:
    """The health of this process.

    It is ready once it has been said to be, and lives unless a learner in the middle of its steps takes no
    further one for more than `shortest` seconds and ten times the median of the last ones, before the first
    one SHORTEST: then its devices hang, or on TPUs another host of it is gone; only a restart helps.
    """

    def __init__(self, shortest: float = SHORTEST, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds that never jump."""
        self.ready = threading.Event()
        self._shortest, self._clock = shortest, clock
        self._lock = threading.Lock()
        self._seconds: collections.deque[float] = collections.deque(maxlen=31)  # of the last steps
        self._since: float | None = None  # when the step under way began

    def watching(self, record: Callable[[Any], None]) -> Callable[[Any], None]:
        """`record`, with the steps that pass through it noticed; a learner that steps is ready."""

        def watch(one: Any) -> None:
            record(one)
            with self._lock:
                now = self._clock()
                if isinstance(one, StateChanged):  # waiting for the syncer is no hang
                    self._since = now if one.state is State.STEPPING else None
                elif isinstance(one, StepDone):
                    if self._since is not None:
                        self._seconds.append(now - self._since)
                    self._since = now
                    self.ready.set()

        return watch

    def close(self) -> None:
        """No further step is to be expected."""
        self._since = None

    def hanging(self) -> float | None:
        """Seconds since the last step if they are too many; None: all is well."""
        with self._lock:
            if self._since is None:
                return None
            waited = self._clock() - self._since
            long = SLOWEST * statistics.median(self._seconds) if self._seconds else SHORTEST
        return waited if waited > max(self._shortest, long) else None


def serve(address: str, health: Health) -> http.server.ThreadingHTTPServer:
    """Answers GET /live and GET /ready at HOST:PORT with 200, or 503 and a line that says why not.

    It ends with the process. Raises ConfigError where the address is not available.
    """

    class Answers(http.server.BaseHTTPRequestHandler):
        timeout = 5.0  # seconds for a request to come

        def do_GET(self) -> None:
            waited = health.hanging()
            if self.path not in ("/live", "/ready"):
                self._respond(404, "ask for /live or /ready")
            elif waited is not None:
                self._respond(503, f"no step for {waited:.0f} s")
            elif self.path == "/ready" and not health.ready.is_set():
                self._respond(503, "not ready yet")
            else:
                self._respond(200, "ok")

        def _respond(self, code: int, line: str) -> None:
            body = f"{line}\n".encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # a line for each probe would be noise
            del format, args

    host, _, port = address.rpartition(":")
    try:
        server = http.server.ThreadingHTTPServer((host.strip("[]"), int(port)), Answers)
    except OSError as error:
        raise ConfigError(f"health: {address}: cannot be listened on: {error.strerror}") from None
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    return server
