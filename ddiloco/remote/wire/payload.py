"""Fragments as bytes: the arrays one after the other, cut into chunks, put together again in host memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from ddiloco.outer.codecs import ArrayFormat
from ddiloco.outer.host_memory import aligned_empty
from ddiloco.remote.wire.agreement import CHUNK_BYTES, WireError


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


class Receiver:
    """Puts the chunks of one fragment together."""

    def __init__(self, formats: Sequence[ArrayFormat], size: int) -> None:
        """Checks the size, then takes the memory.

        Args:
          formats: shapes and dtypes of the arrays that must come.
          size: bytes that the sender has announced.

        Raises:
          WireError: the arrays have another number of bytes; no memory has been taken.
        """
        expected = sum(part.nbytes for part in formats)
        if size != expected:
            raise WireError("fragment of another size", f"{size} bytes were announced, but it has {expected}")
        self.arrays = tuple(aligned_empty(part.shape, part.dtype) for part in formats)
        self.left = size  # bytes still to come
        views = [array.reshape(-1).view(np.uint8) for array in self.arrays]
        ends = itertools.accumulate(view.nbytes for view in views)
        self._open = [(view, end) for view, end in zip(views, ends, strict=True) if view.nbytes]
        self._size = size

    def take(self, chunk: bytes) -> None:
        """Copies one more chunk.

        Raises:
          WireError: it is empty, or longer than what is still to come.
        """
        if not 0 < len(chunk) <= self.left:
            raise WireError("chunk of another size", f"{len(chunk)} bytes came where {self.left} are left")
        source = np.frombuffer(chunk, np.uint8)
        while source.size:
            view, end = self._open[0]
            at = self._size - self.left - (end - view.nbytes)
            count = min(source.size, view.nbytes - at)
            view[at : at + count] = source[:count]
            source, self.left = source[count:], self.left - count
            if at + count == view.nbytes:
                self._open.pop(0)


def receive(formats: Sequence[ArrayFormat], size: int, messages: Iterator[bytes]) -> tuple[np.ndarray, ...]:
    """Reads one fragment from a stream of messages, and no further message.

    Raises:
      WireError: its size is not that of `formats`, or the stream ends early.
    """
    receiver = Receiver(formats, size)
    while receiver.left:
        chunk = next(messages, None)
        if chunk is None:
            raise WireError("fragment cut short", f"{receiver.left} of {size} bytes did not come")
        receiver.take(chunk)
    return receiver.arrays
