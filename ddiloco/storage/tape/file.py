"""The file of a tape: a hash chain of records, readable up to where its process was killed.

The first line names the format. Each record is the payload's length (32 bits, little-endian), two checks of
eight bytes, and the payload. The head of the chain after a record is the SHA-256 of the head before, the
length and the payload; the second check is its beginning. The first one is that of a SHA-256 of the head
before and the length alone, which distinguishes a damaged length from an unfinished record.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import struct
from typing import NamedTuple

MAGIC = b"ddiloco tape 5\n"
_CHECK = 8  # bytes of a hash that are written
_HEAD = struct.Struct(f"<I{_CHECK}s{_CHECK}s")
_LENGTH = struct.Struct("<I")
HEAD_BYTES = _HEAD.size  # before each record's payload
START = hashlib.sha256(MAGIC).digest()
"""The head of a chain without records."""


class TapeError(Exception):
    """A tape is damaged or cannot be used; the message is one line and names the file."""


def _hashes(head: bytes, length: bytes, payload: bytes) -> tuple[bytes, bytes]:
    """Of the head before with a record's length, and also its payload: the latter is the head after it."""
    chain = hashlib.sha256(head + length)
    of_length = chain.digest()
    chain.update(payload)
    return of_length, chain.digest()


class TapeFile:
    """A tape that is being written, by one thread.

    Attributes:
      head: of its chain.
      records: their number.
    """

    def __init__(self, path: pathlib.Path) -> None:
        """Begins a new file. Raises OSError if it exists already, or the disk refuses."""
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        self._file = os.open(path, flags, 0o644)
        self.head, self.records = START, 0
        self._write(MAGIC)

    def append(self, payload: bytes) -> None:
        """Hands a record to the operating system, so that it outlives this process. Raises OSError.

        After an error nothing more may be appended, since half a record may be there.
        """
        length = _LENGTH.pack(len(payload))
        of_length, self.head = _hashes(self.head, length, payload)
        self.records += 1
        self._write(_HEAD.pack(len(payload), of_length[:_CHECK], self.head[:_CHECK]) + payload)

    def sync(self) -> None:
        """Makes durable what was appended, as far as the disk lets it."""
        with contextlib.suppress(OSError):
            os.fsync(self._file)

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):
            os.close(self._file)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._file, left) :]


class RawRecord(NamedTuple):
    """One record."""

    at: int  # the byte at which it begins
    payload: bytes
    head: bytes  # of the chain after it


class Content(NamedTuple):
    """The records of a tape."""

    records: list[RawRecord]
    # Bytes of an unfinished last record, which is left out; 0 unless the process was killed writing
    torn: int


def read(path: pathlib.Path) -> Content:
    """Reads a tape, without an unfinished last record; raises TapeError if it is damaged, or none."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TapeError(f"{path}: cannot be read: {error.strerror}") from None
    return parse(data, path)


def parse(data: bytes, path: pathlib.Path) -> Content:
    """Like `read`, from the file's bytes."""
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):
            return Content([], len(data))
        raise TapeError(f"{path}: byte 0: is no tape, or one of another format")
    records, at, head = [], len(MAGIC), START
    while len(data) - at >= _HEAD.size:
        length, of_length, end = _HEAD.unpack_from(data, at)
        payload = data[at + _HEAD.size : at + _HEAD.size + length]
        hashes = _hashes(head, data[at : at + _LENGTH.size], payload)
        if hashes[0][:_CHECK] != of_length:
            raise TapeError(f"{path}: byte {at}: is damaged: the hash of a length does not fit")
        if len(payload) < length:
            break
        head = hashes[1]
        if head[:_CHECK] != end:
            raise TapeError(f"{path}: byte {at}: is damaged: the hash of a record does not fit")
        records.append(RawRecord(at, payload, head))
        at += _HEAD.size + length
    return Content(records, len(data) - at)
