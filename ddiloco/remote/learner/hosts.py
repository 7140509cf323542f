"""A learner of several hosts: processes of one JAX job, with one mesh over the devices of all of them.

Host 0 leads. It talks with the syncer, decides, and tells the others before each step boundary what happens
there, so that all hand the same programs to their devices in the same order. Each exchanges its own blocks of
the fragments with the syncer. They live and die as one: a job cannot go on without one of its processes.
"""

from __future__ import annotations

import collections
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ddiloco.goodput.accounting import State
from ddiloco.observe import records

REFUSED = 2  # exit code of a process that would end the same way again
HANGS = 10  # median steps that a step takes at most
_STARTING_SECONDS = 300  # for all hosts to be there


class HostPlace(NamedTuple):
    """Which of its learner's hosts this process is."""

    number: int  # from 0
    count: int  # of them
    coordinator: str  # HOST:PORT of JAX's coordinator, on host 0, which also leads at the port after it

    @property
    def leader(self) -> str:
        """HOST:PORT at which host 0 leads."""
        host, _, port = self.coordinator.rpartition(":")
        return f"{host}:{int(port) + 1}"

    def join(self) -> None:
        """Joins the job of all hosts, before anything asks JAX for its devices.

        If not all of them come, this process ends, to be started again with the missing host.
        """
        jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
        try:
            jax.distributed.initialize(
                self.coordinator,
                self.count,
                self.number,
                initialization_timeout=_STARTING_SECONDS,
            )
        except RuntimeError as error:
            problem = f"{error}".splitlines()[0]
            end_at_once(f"coordinator: {self.coordinator}: the hosts do not come together: {problem}")


def end_at_once(why: str, code: int = 1) -> None:
    """Ends this process, whatever its threads and devices wait for; the launcher starts all hosts again."""
    print(f"error: {why}", file=sys.stderr, flush=True)
    os._exit(code)


class StepWatch:
    """Sees steps end, and calls `hangs` when one takes ten times the median and more than `least` seconds.

    On TPUs the loss of a host shows in nothing else.
    """

    def __init__(self, least: float, hangs: Callable[[str], None]) -> None:
        self._least, self._hangs = least, hangs
        self._lock = threading.Lock()
        self._seconds: collections.deque[float] = collections.deque(maxlen=31)
        self._since: float | None = None  # when the step under way began
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="step-watch", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopping.set()

    def watching(self, record: Callable[[Any], None]) -> Callable[[Any], None]:
        """`record`, which takes what a learner's worker records, with this looking on."""

        def seen(what: Any) -> None:
            with self._lock:
                now = time.monotonic()
                if isinstance(what, records.StateChanged):
                    self._since = now if what.state is State.STEPPING else None
                elif isinstance(what, records.StepDone) and self._since is not None:
                    self._seconds.append(now - self._since)
                    self._since = now
            record(what)

        return seen

    def overdue(self, now: float) -> str | None:
        """In a line, that the step under way hangs; None: it does not."""
        with self._lock:
            if self._since is None or not self._seconds:
                return None
            median, taken = statistics.median(self._seconds), now - self._since
        if taken <= max(self._least, HANGS * median):
            return None
        return f"a step hangs: {taken:.1f} s, where the median is {median:.2g} s"

    def _run(self) -> None:
        while not self._stopping.wait(self._least / 20):
            why = self.overdue(time.monotonic())
            if why is not None:
                self._hangs(why)
                return
