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
    expected = sum(part.nbytes for part in formats)
    if size != expected:
        raise WireError("fragment of another size", f"{size} bytes were announced, but it has {expected}")
    arrays = tuple(aligned_empty(part.shape, part.dtype) for part in formats)
    room = [array.reshape(-1).view(np.uint8) for array in arrays if array.nbytes]
    left = size
    while left:
        chunk = next(messages, None)
        if chunk is None:
            raise WireError("fragment cut short", f"{left} of {size} bytes did not come")
        if not 0 < len(chunk) <= left:
            raise WireError("chunk of another size", f"{len(chunk)} bytes came where {left} are left")
        _fill(room, chunk)
        left -= len(chunk)
    return arrays


def _fill(room: list[np.ndarray], chunk: bytes) -> None:
    """Copies the chunk to the first free room, and returns the rest of it."""
    source = np.frombuffer(chunk, np.uint8)
    while source.size:
        count = min(source.size, room[0].size)
        room[0][:count] = source[:count]
        source, room[0] = source[count:], room[0][count:]
        if not room[0].size:
            room.pop(0)
