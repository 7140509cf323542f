"""Standard output and error: what cannot be written is dropped, and never ends a program that trains."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading

READER_SECONDS = 5.0  # that a program which trains waits for a reader of its output that takes nothing
_names = {1: "stdout", 2: "stderr"}  # of sys, by descriptor
_best_effort = threading.Event()


class OutputStream(io.FileIO):
    """The raw end of a standard stream, on which writing never fails; the first error is kept."""

    error: OSError | None = None
    _stuck = False  # its reader took nothing for READER_SECONDS

    def write(self, data: bytes | memoryview) -> int:
        """Writes some of the data, or drops all of it; returns the number of bytes written or dropped."""
        data = memoryview(data).cast("B")
        try:
            waits = 0.0 if self._stuck else READER_SECONDS
            self._stuck = not self._has_room(waits if _best_effort.is_set() else None)
            if self._stuck:
                return len(data)
            # As much as surely fits where there is room for any; None: another writer was faster.
            return super().write(data[: select.PIPE_BUF]) or 0
        except OSError as error:
            self.error = self.error or error
            return len(data)

    def _has_room(self, seconds: float | None) -> bool:
        """Whether there is room within so many seconds; None: waits without end."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        return bool(poll.poll(None if seconds is None else 1000 * seconds))


def open_closed() -> None:
    """Opens the standard streams that are closed onto nothing, before another file gets their numbers."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(number, True)
    for number, name in _names.items():
        if getattr(sys, name) is None:  # it was closed when Python started
            setattr(
                sys, name, _text(OutputStream(number, "w", closefd=False), "utf-8", "backslashreplace", True)
            )


def protect() -> None:
    """Makes this process independent of who reads its output; a text that has no encoding is escaped."""
    open_closed()
    for number, name in _names.items():
        old = getattr(sys, name)
        if old is not getattr(sys, f"__{name}__") or not isinstance(old, io.TextIOWrapper):
            continue  # another program's, such as a test's
        with contextlib.suppress(OSError):
            old.flush()
        errors = "backslashreplace" if old.errors == "strict" else old.errors
        lines = old.line_buffering or old.write_through
        setattr(sys, name, _text(OutputStream(number, "w", closefd=False), old.encoding, errors, lines))


def best_effort() -> None:
    """From now on output that is lost is no failure, and a reader that takes nothing is not waited for."""
    _best_effort.set()


def failure() -> OSError | None:
    """Why results on standard output were not all written; None where they were, or are no results."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.error if isinstance(raw, OutputStream) and not _best_effort.is_set() else None


def _text(raw: OutputStream, encoding: str, errors: str, line_buffering: bool) -> io.TextIOWrapper:
    stream = io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=line_buffering)
    stream.mode = "w"
    return stream
