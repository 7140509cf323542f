"""Prints a process's output as JSON, an object a line, for log collectors (`config.log.json`)."""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import io
import json
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

_NOTHING: Mapping[str, Any] = types.MappingProxyType({})
_about = contextvars.ContextVar("about", default=_NOTHING)


@contextlib.contextmanager
def about(**labels: Any) -> Iterator[None]:
    """Labels the lines that this thread prints in the `with` block; None is left out."""
    token = _about.set({**_about.get(), **_known(labels)})
    try:
        yield
    finally:
        _about.reset(token)


class JsonLines(io.TextIOBase):
    """A stream whose lines become objects: time, labels of the process and of the line, and the message."""

    def __init__(self, stream: TextIO, labels: Mapping[str, Any]) -> None:
        self._stream, self._labels = stream, labels
        self._begun = threading.local()  # the line that each thread has not ended yet
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        """Buffers the text until its line ends; empty lines are dropped."""
        *whole, self._begun.text = (getattr(self._begun, "text", "") + text).split("\n")
        objects = [self._object(line.strip("\r")) for line in whole if line.strip()]
        with self._lock:
            self._stream.write("".join(f"{one}\n" for one in objects))
        return len(text)

    def flush(self) -> None:
        """Passes on the lines that have ended."""
        self._stream.flush()

    def fileno(self) -> int:
        """That of the stream behind it."""
        return self._stream.fileno()

    def _object(self, line: str) -> str:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        return json.dumps({"time": now, **self._labels, **_about.get(), "message": line})


def speak_json(**labels: Any) -> None:
    """From now on all that this process prints is JSON with these labels; None is left out."""
    sys.stdout = JsonLines(sys.stdout, {**_known(labels), "stream": "stdout"})
    sys.stderr = JsonLines(sys.stderr, {**_known(labels), "stream": "stderr"})


def _known(labels: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in labels.items() if value is not None}
