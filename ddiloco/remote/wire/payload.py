"""Fragments as bytes: the arrays in order, cut into chunks, and assembled again in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ddiloco.arrays.host_memory import aligned_empty
from ddiloco.outer.codecs import ArrayFormat
from ddiloco.remote.wire.validation import CHUNK_BYTES, WireError


def payload_bytes(arrays: Sequence[np.ndarray]) -> int:
    """Bytes of the arrays on the wire."""
    return sum(array.nbytes for array in arrays)


def chunks(arrays: Sequence[np.ndarray], chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """The arrays' bytes in row-major order, each chunk full but the last; every byte is copied once."""
    parts: list[memoryview] = []
    room = chunk_bytes
    for array in arrays:
        left = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        while len(left):
            parts.append(left[:room])
            left, room = left[room:], room - len(parts[-1])
            if room == 0:
                yield b"".join(parts)
                parts, room = [], chunk_bytes
    if parts:
        yield b"".join(parts)


def receive(formats: Sequence[ArrayFormat], size: int, messages: Iterator[bytes]) -> tuple[np.ndarray, ...]:
    """Reads one fragment from a stream of messages, and no further message.

    Args:
      formats: shapes and dtypes of the arrays that must come.
      size: bytes that the sender has announced.
      messages: the chunks first.

    Raises:
      WireError: the arrays have another number of bytes (no memory has been taken); a chunk is empty, or
        longer than the missing rest; or the stream ends early.
    """
    received = PayloadReader(formats, size)
    while received.left:
        received.add(next(messages, None))
    return received.arrays


class PayloadReader:
    """A fragment that comes in chunks; raises WireError as `receive`.

    Attributes:
      arrays: of the formats; what has not come yet is undefined.
      left: bytes that have not.
    """

    def __init__(self, formats: Sequence[ArrayFormat], size: int) -> None:
        """`size`: bytes that the sender has announced."""
        expected = sum(part.nbytes for part in formats)
        if size != expected:
            raise WireError("fragment of another size", f"{size} bytes were announced, but it has {expected}")
        self.arrays = tuple(aligned_empty(part.shape, part.dtype) for part in formats)
        self._room = [array.reshape(-1).view(np.uint8) for array in self.arrays if array.nbytes]
        self.left = self._size = size

    def add(self, chunk: bytes | None) -> None:
        """Adds the next chunk; None: there is none."""
        if chunk is None:
            raise WireError("fragment cut short", f"{self.left} of {self._size} bytes did not come")
        if not 0 < len(chunk) <= self.left:
            raise WireError("chunk of another size", f"{len(chunk)} bytes came where {self.left} are left")
        self.left -= len(chunk)
        source, room = np.frombuffer(chunk, np.uint8), self._room
        while source.size:
            count = min(source.size, room[0].size)
            room[0][:count] = source[:count]
            source, room[0] = source[count:], room[0][count:]
            if not room[0].size:
                room.pop(0)
