"""The file of a tape: records with chained checksums, readable up to where its process was killed.

The first line names the format. Each record is three little-endian 32-bit numbers (the payload's length and
two checksums) and the payload. The first checksum covers the length, the second length and payload; each
continues the checksum of the record before, so no record can be changed, moved or left out unnoticed.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import struct
import zlib
from typing import NamedTuple

MAGIC = b"ddiloco tape 3\n"
_HEAD = struct.Struct("<III")
_LENGTH = struct.Struct("<I")
HEAD_BYTES = _HEAD.size  # before each record's payload
_START = zlib.crc32(MAGIC)


class TapeError(Exception):
    """A tape is damaged or cannot be used; the message is one line and names the file."""


class TapeFile:
    """A tape that is being written, by one thread."""

    def __init__(self, path: pathlib.Path) -> None:
        """Begins a new file. Raises OSError if it exists already, or the disk refuses."""
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        self._file = os.open(path, flags, 0o644)
        self._chain = _START
        self._write(MAGIC)

    def append(self, payload: bytes) -> None:
        """Hands a record to the operating system, so that it outlives this process. Raises OSError.

        After an error nothing more may be appended, since half a record may be there.
        """
        length = _LENGTH.pack(len(payload))
        check = zlib.crc32(length, self._chain)
        self._chain = zlib.crc32(payload, check)
        self._write(_HEAD.pack(len(payload), check, self._chain) + payload)

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


class Content(NamedTuple):
    """The records of a tape."""

    records: list[tuple[int, bytes]]  # the payloads in order, each with the byte at which its record begins
    # Bytes of an unfinished last record, which is left out; 0 unless the process was killed writing
    torn: int


def read(path: pathlib.Path) -> Content:
    """Reads a tape, without an unfinished last record; raises TapeError if it is damaged, or none."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TapeError(f"{path}: cannot be read: {error.strerror}") from None
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):
            return Content([], len(data))
        raise TapeError(f"{path}: byte 0: is no tape, or one of another format")
    records, at, chain = [], len(MAGIC), _START
    while len(data) - at >= _HEAD.size:
        length, check, end = _HEAD.unpack_from(data, at)
        if zlib.crc32(data[at : at + _LENGTH.size], chain) != check:
            raise TapeError(f"{path}: byte {at}: is damaged: the checksum of a length does not fit")
        payload = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(payload) < length:
            break
        if zlib.crc32(payload, check) != end:
            raise TapeError(f"{path}: byte {at}: is damaged: the checksum of a record does not fit")
        chain = end
        records.append((at, payload))
        at += _HEAD.size + length
    return Content(records, len(data) - at)
