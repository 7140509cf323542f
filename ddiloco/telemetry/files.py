"""A run's files: those that grow by whole records, and those that are replaced as a whole."""

from __future__ import annotations

import contextlib
import io
import json
import math
import mmap
import os
import pathlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ddiloco.telemetry.alarms import Alarms

UNFINISHED = ".new"  # how the name of a file ends that is still being written
MAX_PENDING = 1 << 24  # bytes of a file that the disk has not taken
MAX_BYTES = 1 << 30  # of a file of learners' records


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a path to write to; after the `with` block that file replaces `path`.

    A reader sees the old file or the new one. Raises OSError where the disk refuses; the old one then stands.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        yield new
        os.replace(new, path)
    except BaseException:  # also Ctrl-C
        new.unlink(missing_ok=True)
        raise


def write_json(path: pathlib.Path, values: Mapping[str, Any]) -> None:
    """Replaces the file in one step; raises OSError if the disk refuses, and then keeps the old one."""
    with replacing(path) as new:
        new.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n")


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The file's content; empty if it is missing or invalid."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def read_lines(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line of a .jsonl with its value, {} for a torn line; nothing if there is no file.

    Raises OSError where the disk refuses.
    """
    with contextlib.suppress(FileNotFoundError), path.open(errors="replace") as file:
        for line in file:
            try:
                yield line, dict(json.loads(line))
            except (ValueError, TypeError):
                yield line, {}


def read_values(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The value of each line of a .jsonl but for torn ones; nothing if there is no file."""
    return (values for _, values in read_lines(path) if values)


class GrowingFile:
    """Appends bytes; what could not be written stays pending and is tried again at the next flush.

    Nothing is opened before the first flush. Every byte is written once and in order, however often
    a write fails or stops half-way: buffered files of the standard library give no such promise.
    """

    def __init__(self, path: pathlib.Path, *, max_bytes: float = math.inf) -> None:
        """A torn last line that a killed process left in a .jsonl is cut off before anything is added."""
        self._path = path
        with contextlib.suppress(OSError):
            max_bytes -= path.stat().st_size
        self._room = max_bytes
        self.full = False  # whether a record was given up because the file would grow beyond `max_bytes`
        self._cut_first = path.suffix == ".jsonl"
        self._pending = bytearray()
        self._file: io.FileIO | None = None
        self.lost = 0  # bytes dropped because too many were pending

    @property
    def pending(self) -> int:
        """Bytes not yet written."""
        return len(self._pending)

    def append(self, record: bytes) -> None:
        """Adds one record to what is pending; drops it if too much is, or the file would grow too long."""
        if self.full or len(record) > self._room:
            self.full = True
        elif self.pending + len(record) > MAX_PENDING:
            self.lost += len(record)
        else:
            self._pending += record
            self._room -= len(record)

    def flush(self) -> None:
        """Writes what is pending; raises OSError where the disk refuses the rest, which stays pending."""
        while self._pending:
            if self._file is None:
                self._file = self._open()
            del self._pending[: self._file.write(self._pending)]

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
        if self._cut_first and self._path.exists() and self._path.stat().st_size:
            with self._path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as seen:
                whole = seen.rfind(b"\n") + 1
            os.truncate(self._path, whole)
        self._cut_first = False  # from now on a torn line is this process's own, and its rest is pending
        return io.FileIO(self._path, "a")


class GrowingFiles:
    """Growing files under one folder; one that cannot be written does not disturb the others.

    A full disk refuses all of them, so there is one alarm for the folder, not one for each file. What a
    learner says cannot fill the disk: files that are `bounded` take no records beyond MAX_BYTES.
    """

    def __init__(self, root: pathlib.Path, alarms: Alarms) -> None:
        self._root, self._alarms = root, alarms
        self._files: dict[str, GrowingFile] = {}

    def append(self, name: str, record: bytes, at_once: bool = False, bounded: bool = False) -> None:
        """Adds a record to the file of that name below the root; it is written now or at the next flush."""
        if name not in self._files:
            most = MAX_BYTES if bounded else math.inf
            self._files[name] = GrowingFile(self._root / name, max_bytes=most)
        self._files[name].append(record)
        if at_once:
            self._try(GrowingFile.flush, name)

    def flush(self) -> bool:
        """Writes what is pending; what the disk refuses is tried again at the next flush. Whether all is."""
        for name in list(self._files):  # an alarm may add a file
            self._try(GrowingFile.flush, name)
        return not any(file.pending for file in self._files.values())

    def close(self) -> None:
        """Flushes and closes all files."""
        for name in list(self._files):
            self._try(GrowingFile.close, name)

    def _try(self, action: Callable[[GrowingFile], None], name: str) -> None:
        file = self._files[name]
        with self._alarms.guard(str(self._root)):
            action(file)
        if file.full:
            problem = f"has grown to {MAX_BYTES >> 20} MiB, and takes no more records"
            self._alarms.raise_once(f"full {self._root / name}", f"{self._root / name}: {problem}")
        if file.lost:
            waiting = f"records were given up, {file.pending} bytes are waiting"
            self._alarms.raise_once(f"lost {self._root}", f"{self._root / name}: {waiting}")
