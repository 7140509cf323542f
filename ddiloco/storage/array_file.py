"""Arrays in a file, with a header and a checksum; a crash leaves the old file or the new one.

A path may also be in a bucket (`gs://...`, by etils.epath), where an object is there once it is whole.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import pathlib
import secrets
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from ddiloco.telemetry.files import UNFINISHED

_LENGTH = struct.Struct("<Q")  # of the header that follows, in bytes
_CRC = b"crc32\n"  # after the magic: the file ends with a CRC-32
_CRC_BYTES = 4
_BLOCK = 1 << 20  # bytes that are checked and written while they are in the processor's cache


def save(path: epath.Path, magic: bytes, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> None:
    """Writes JSON values and arrays over an older file; returns when they are durable.

    `magic` is the file's first line and names its format. Raises OSError if the disk refuses.
    """
    whole = {**header, "arrays": [[_dtype_text(array.dtype), list(np.shape(array))] for array in arrays]}
    encoded = json.dumps(whole).encode()
    parts = [magic, _CRC, _LENGTH.pack(len(encoded)), encoded]
    parts += [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]
    replace(path, _checked(parts))


def _checked(parts: Iterable[Any]) -> Iterator[Any]:
    """The parts in blocks, then their CRC-32."""
    crc = 0
    for part in map(memoryview, parts):
        for at in range(0, len(part), _BLOCK):
            block = part[at : at + _BLOCK]
            crc = zlib.crc32(block, crc)
            yield block
    yield crc.to_bytes(_CRC_BYTES, "little")


def load(path: epath.Path, magic: bytes) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The header and the arrays of a file, which are read-only and share its bytes: any of them keeps all.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: it cannot be read or is damaged; the message is one line and names it.
    """
    try:
        with as_os_error(path):
            data = path.read_bytes()
        return parse(data, magic)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def load_header(path: pathlib.Path, magic: bytes) -> dict[str, Any]:
    """The header alone, of a file that is not checked; raises OSError, or ValueError if there is none."""
    begin = magic + _CRC
    with path.open("rb") as file:
        try:
            if file.read(len(begin)) != begin:
                raise ValueError("it begins otherwise")
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            header: dict[str, Any] = json.loads(file.read(min(length, path.stat().st_size)))
        except (ValueError, RecursionError, struct.error):
            raise ValueError(f"{path}: is damaged: its header cannot be read") from None
    return header


def parse(data: bytes, magic: bytes) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Like `load`, from a file's bytes; a damaged header cannot make it allocate more than their size."""
    begin, body = magic + _CRC, memoryview(data)[:-_CRC_BYTES]
    check = zlib.crc32(body).to_bytes(_CRC_BYTES, "little")
    if not data.startswith(begin) or check != data[-_CRC_BYTES:]:
        raise ValueError("is damaged: its checksum does not fit")
    try:
        return _parse(body, len(begin))
    except Exception as error:  # JSON, struct and numpy each raise their own
        raise ValueError(f"is damaged: its header cannot be read: {type(error).__name__}") from None


def _parse(body: memoryview, at: int) -> tuple[dict[str, Any], list[np.ndarray]]:
    (length,) = _LENGTH.unpack_from(body, at)
    at += _LENGTH.size
    header = json.loads(bytes(body[at : at + length]))
    at += length
    arrays = []
    for name, shape in header.pop("arrays"):
        dtype, count = np.dtype(str(name)), math.prod(shape)
        if count < 0:  # which NumPy takes for all that there is
            raise ValueError("an array has a negative size")
        array = np.frombuffer(body[at : at + count * dtype.itemsize], dtype)
        arrays.append(array.reshape(shape))
        at += array.nbytes
    return header, arrays


def _dtype_text(dtype: np.dtype) -> str:
    """A text that makes the dtype again; numpy writes types such as bfloat16 as void, so these go by name."""
    return dtype.name if dtype.kind == "V" else dtype.str


def replace(path: epath.Path, parts: Iterable[Any]) -> None:
    """Writes a file over an older one: after a crash, one of the two is there, whole.

    Raises:
      OSError: the disk, or the bucket, refuses; the older file stands, and nothing else is left.
    """
    if in_bucket(path):
        with as_os_error(path):
            path.write_bytes(b"".join(parts))
        return
    path = pathlib.Path(path)
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        with new.open("xb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:  # also Ctrl-C, and where memory is full
        new.unlink(missing_ok=True)
        raise
    make_durable(path.parent)


def in_bucket(path: epath.Path) -> bool:
    """Whether a path is not on a disk."""
    return "://" in os.fspath(path)


@contextlib.contextmanager
def as_os_error(path: epath.Path) -> Iterator[None]:
    """Turns a bucket library's own errors into OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if not in_bucket(path):
            raise
        raise OSError(errno.EIO, f"{error} ".splitlines()[0] or type(error).__name__) from error


def sweep(folder: pathlib.Path, name: str = "") -> None:
    """Removes unfinished files of these names, as far as the disk lets it; only for their one writer."""
    with contextlib.suppress(OSError):
        for left in folder.glob(f".{name}*{UNFINISHED}"):
            left.unlink(missing_ok=True)


def make_durable(folder: pathlib.Path) -> None:
    """Flushes a folder's list of files to the disk; raises OSError."""
    held = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(held)
    finally:
        os.close(held)
