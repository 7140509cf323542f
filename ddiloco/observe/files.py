"""A file that only grows by whole records, and keeps them in memory while the disk refuses them."""

from __future__ import annotations

import io
import os
import pathlib
from collections.abc import Callable

from ddiloco.observe.alarms import Alarms

MAX_PENDING = 1 << 24


class GrowingFile:
    """Appends bytes; what could not be written stays pending and is tried again at the next flush.

    Nothing is opened before the first flush. Every byte is written once and in order, however often
    a write fails or stops half-way.
    """

    def __init__(self, path: pathlib.Path, *, lines: bool = False, max_pending: int = MAX_PENDING) -> None:
        """With `lines`, a torn last line that a killed process left is cut off before anything is added."""
        self._path = path
        self._cut_first = lines
        self._max_pending = max_pending
        self._pending: list[bytes] = []
        self._size = 0
        self._file: io.FileIO | None = None
        self.lost = 0  # bytes given up because too many were pending

    @property
    def pending(self) -> int:
        """Bytes not yet written."""
        return self._size

    def append(self, record: bytes) -> None:
        """Adds one record to what is pending; gives the record up if `max_pending` bytes are waiting."""
        if self._size + len(record) > self._max_pending:
            self.lost += len(record)
            return
        self._pending.append(record)
        self._size += len(record)

    def flush(self) -> None:
        """Writes what is pending.

        Raises:
          OSError: the disk refused; the rest stays pending.
        """
        if not self._pending:
            return
        if self._file is None:
            self._file = self._open()
        data = b"".join(self._pending)
        while data:
            self._pending, self._size = [data], len(data)
            written = self._file.write(data)
            data = data[written:]
        self._pending, self._size = [], 0

    def close(self) -> None:
        """Flushes and closes; a later flush opens the file again."""
        try:
            self.flush()
        finally:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _open(self) -> io.FileIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._cut_first and self._path.exists():
            _cut_torn_line(self._path)
        self._cut_first = False  # from now on a torn line is ours, and its rest is pending
        return io.FileIO(self._path, "a")


def _cut_torn_line(path: pathlib.Path) -> None:
    with open(path, "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 4096)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        file.truncate(end)


class GrowingFiles:
    """Growing files under one folder; one that cannot be written troubles no other.

    A full disk refuses all of them alike, so that there is one alarm for the folder, not one for each file.
    """

    def __init__(self, root: pathlib.Path, alarms: Alarms, *, lines: bool = False) -> None:
        self._root, self._alarms, self._lines = root, alarms, lines
        self._files: dict[str, GrowingFile] = {}

    def append(self, name: str, record: bytes) -> None:
        """Adds a record to the file of that name, relative to the root; nothing is written yet."""
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = GrowingFile(self._root / name, lines=self._lines)
        file.append(record)

    def flush(self) -> None:
        """Writes what is pending; what the disk refuses is tried again at the next flush."""
        self._each(GrowingFile.flush)

    def close(self) -> None:
        """Flushes and closes all files."""
        self._each(GrowingFile.close)

    def _each(self, action: Callable[[GrowingFile], None]) -> None:
        for name, file in self._files.items():
            with self._alarms.guard(str(self._root)):
                action(file)
            if file.lost:
                self._alarms.raise_once(
                    f"lost {self._root}",
                    f"{self._root / name}: records were given up, {file.pending} bytes are waiting",
                )
