"""Waits of a process, shown in its progress line, or a line of its own, after a few seconds."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator

SHOWN_AFTER = 5.0  # seconds


@dataclasses.dataclass(eq=False)
class _Wait:
    what: str
    since: float
    shown: bool = False


class Waits:
    """The waits of a process, which any thread may begin."""

    def __init__(self, print_line: Callable[[str], None], shown_after: float = SHOWN_AFTER) -> None:
        """`print_line` takes a line on a wait of so many seconds where no progress line is drawn."""
        self.name = ""  # of the process, at the beginning of such a line
        self._print_line, self._shown_after = print_line, shown_after
        self._lock = threading.Lock()
        self._under_way: list[_Wait] = []  # in the order in which they began
        self._lines = 0  # progress lines that are shown

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """In the `with` block this thread waits for something."""
        wait = _Wait(what, time.monotonic())
        timer = threading.Timer(self._shown_after, self._print_wait, (wait,))
        timer.daemon = True
        with self._lock:
            self._under_way.append(wait)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            with self._lock:
                self._under_way.remove(wait)

    @contextlib.contextmanager
    def on_progress_line(self) -> Iterator[None]:
        """In the `with` block a progress line is shown, with `reason`."""
        with self._lock:
            self._lines += 1
        try:
            yield
        finally:
            with self._lock:
                self._lines -= 1

    def reason(self) -> str | None:
        """Reason and duration of the newest long wait; None: none."""
        now = time.monotonic()
        with self._lock:
            long = [wait for wait in self._under_way if now >= wait.since + self._shown_after]
            for wait in long:
                wait.shown = True
        return f"waiting {now - long[-1].since:.0f} s for {long[-1].what}" if long else None

    def not_shown(self) -> bool:
        """Whether a long wait has not been shown yet."""
        due = time.monotonic() - self._shown_after
        with self._lock:
            return any(wait.since <= due and not wait.shown for wait in self._under_way)

    def _print_wait(self, wait: _Wait) -> None:
        with self._lock:
            if self._lines or wait.shown or wait not in self._under_way:
                return
            wait.shown = True
        self._print_line(f"{f'{self.name}: ' if self.name else ''}waiting for {wait.what}")


def _to_stderr(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it
        print(line, file=sys.stderr, flush=True)


PROCESS = Waits(_to_stderr)  # those of this process
waiting = PROCESS.waiting
