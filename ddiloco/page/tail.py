"""What was added to a file since one last looked, in whole lines."""

from __future__ import annotations

import collections
import json
import math
import os
import pathlib
from typing import Any

CHUNK = 1 << 18  # bytes that are read at a time


class Replaced(Exception):
    """The file is another one, or shorter than what was read of it, which no longer counts."""


class LineTail:
    """The lines of a .jsonl file that grows, one after the other in their order."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._offset, self._inode = 0, 0
        self._ahead: collections.deque[dict[str, Any]] = collections.deque()
        self.time = math.inf  # of the next line, once `look` has found one

    def look(self) -> None:
        """Reads on, if no line is left; raises Replaced."""
        if self._ahead:
            return
        data = self._more()
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) >= CHUNK:
            whole = len(data)  # no line is that long: it is skipped
        self._offset += whole
        self._ahead.extend(_values(data[:whole].splitlines()))
        self._next()

    def take(self) -> dict[str, Any]:
        """The next line; `time` must not be infinite."""
        line = self._ahead.popleft()
        if self._ahead:
            self._next()
        else:
            self.look()
        return line

    def _more(self) -> bytes:
        """Up to CHUNK bytes from where whole lines have been read to."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if self._offset and (status.st_ino, status.st_size < self._offset) != (self._inode, False):
                    raise Replaced(str(self._path))
                self._inode = status.st_ino
                file.seek(self._offset)
                return file.read(CHUNK)
        except OSError:
            if self._offset:
                raise Replaced(str(self._path)) from None
            return b""

    def _next(self) -> None:
        self.time = self._ahead[0]["time"] if self._ahead else math.inf


def _values(lines: list[bytes]) -> list[dict[str, Any]]:
    """Of each line that is an object with a time; all at once, or one by one where one is torn."""
    try:
        values = json.loads(b"[" + b",".join(lines) + b"]")
    except ValueError:
        values = [_value(line) for line in lines]
    return [
        value for value in values if isinstance(value, dict) and isinstance(value.get("time"), int | float)
    ]


def _value(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
