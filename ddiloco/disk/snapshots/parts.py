"""The parts of a snapshot on disk: arrays and JSON values of one process each, written by Orbax."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

SYNCER_PART = "syncer"
STAGING = "staging"
"""Where parts are written before the syncer takes them in: one that comes too late does no harm there."""

_NAME = re.compile(r"[a-z0-9_]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1 << 20
_LARGEST_FILE = 1 << 50


class SnapshotError(Exception):
    """A snapshot or a part of it cannot be written or used; the message is one line."""


def learner_part(learner: int) -> str:
    """The name of a learner's part."""
    return f"learner_{learner:03d}"


def parts_folder(snapshots: pathlib.Path) -> pathlib.Path:
    """Where the parts of a run's snapshots are written first."""
    return snapshots / STAGING


@dataclasses.dataclass(frozen=True)
class Part:
    """What one process contributes; whoever hands it to a writer leaves it as it is from then on."""

    arrays: Mapping[str, np.ndarray | jax.Array]
    state: dict[str, Any]
    """JSON values."""


@dataclasses.dataclass(frozen=True)
class PartFiles:
    """What a part that was written looks like on disk, and what it says.

    Attributes:
      files: by path relative to the part's folder, the size in bytes and the sha256 of each of its files.
      content: sha256 of its state and arrays, whatever files they are in.
    """

    files: Mapping[str, tuple[int, str]]
    content: str

    def to_json(self) -> dict[str, Any]:
        """As JSON values; `from_json` gives an equal one."""
        return {"content": self.content, "files": {path: list(told) for path, told in self.files.items()}}

    @classmethod
    def from_json(cls, told: Any) -> PartFiles:
        """Of what `to_json` told.

        Raises:
          ValueError: it cannot be that; no path leads out of the part's folder.
        """
        try:
            files = {path: (size, digest) for path, (size, digest) in told["files"].items()}
            content, fields = told["content"], set(told)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError("describes a part otherwise than by content and files") from None
        sound = fields == {"content", "files"} and _is_digest(content) and bool(files)
        for path, (size, digest) in files.items():
            names = path.split("/")
            sound &= not {"", ".", ".."} & set(names) and "\0" not in path and "\\" not in path
            sound &= type(size) is int and 0 <= size <= _LARGEST_FILE and _is_digest(digest)
        if not sound:
            raise ValueError("describes a part by a path, a size or a sha256 that is none")
        return cls(files, content)


class PartWriter:
    """Writes the parts of one process, one after the other in a thread of its own. For several threads."""

    def __init__(self, folder: pathlib.Path) -> None:
        """`folder` is that of the run's snapshots; it is made when the first part is written."""
        self._folder = folder
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "snapshot")
        self._lock = threading.Lock()
        self._unfinished: set[concurrent.futures.Future[PartFiles]] = set()

    def write(self, number: int, name: str, part: Part) -> concurrent.futures.Future[PartFiles]:
        """Begins to write a part; what comes of it, also that the disk refuses, comes out of the future.

        Any thread may call it. Arrays on devices are copied to the host by the writer's thread. The part is
        durable once the future has a result. Errors are SnapshotError.
        """
        try:
            future = self._pool.submit(write_part, self._folder / f"{number:06d}", name, part)
        except RuntimeError:
            future = concurrent.futures.Future()
            future.set_exception(SnapshotError(f"snapshot {number}, {name}: the writer is closed"))
        with self._lock:
            self._unfinished = {one for one in (*self._unfinished, future) if not one.done()}
        return future

    def close(self, timeout: float) -> None:
        """Gives what is being written so many seconds to end; what has not begun is cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            running = [one for one in self._unfinished if not one.done()]
        concurrent.futures.wait(running, timeout)


def write_part(snapshot: pathlib.Path, name: str, part: Part) -> PartFiles:
    """Writes a part as a new folder in that of its snapshot; returns when it is durable.

    Raises:
      SnapshotError: the disk refuses, or Orbax cannot write what is in the part.
    """
    if not is_part_name(name):
        raise SnapshotError(f"{name!r} is no name of a part: it must be 1 to 64 of a-z, 0-9 and _")
    folder = snapshot / name
    try:
        arrays = {key: np.asarray(array) for key, array in sorted(part.arrays.items())}
        state = json.loads(json.dumps(part.state))
        shapes = {key: [array.dtype.name, list(array.shape)] for key, array in arrays.items()}
        # Orbax gives what has no axis back as a number, and takes nothing that is empty.
        stored = {key: array.reshape(array.shape or 1) for key, array in arrays.items() if array.size}
        snapshot.mkdir(parents=True, exist_ok=True)
        items: dict[str, Any] = {"state": ocp.args.JsonSave({"state": state, "arrays": shapes})}
        if stored:
            items["arrays"] = ocp.args.PyTreeSave(stored)
        with ocp.AsyncCheckpointer(_handler()) as checkpointer:
            checkpointer.save(folder.resolve(), ocp.args.Composite(**items))
            checkpointer.wait_until_finished()
        files = {path: _digest(folder / path, durable=True) for path in files_under(folder)}
        for below in (*(path for path in folder.rglob("*") if path.is_dir()), folder, snapshot):
            make_durable(below)
        return PartFiles(files, _content(state, arrays))
    except Exception as error:  # Orbax raises many kinds where the disk refuses
        raise SnapshotError(f"{folder}: cannot be written: {reason(error)}") from error


def check_listing(folder: pathlib.Path, files: PartFiles) -> None:
    """Sees that the files of a part are there, each of its size, and no other; opens none.

    Raises:
      SnapshotError: it is not so.
    """
    with _told_of(folder):
        there = files_under(folder)
        if there != sorted(files.files):
            first = min(set(there) ^ set(files.files))
            told = "does not belong there" if first in there else "is missing"
            raise SnapshotError(f"{folder.name}/{first} {told}")
        for path, (size, _) in files.files.items():
            if (folder / path).stat().st_size != size:
                raise SnapshotError(f"{folder.name}/{path} is not of the size that it was written with")


def check_bytes(folder: pathlib.Path, files: PartFiles, below: str = "") -> None:
    """Sees that every byte of a part is as it was written; of the files whose paths begin with `below`.

    Raises:
      SnapshotError: it is not so.
    """
    with _told_of(folder):
        for path, told in files.files.items():
            if path.startswith(below) and _digest(folder / path) != told:
                raise SnapshotError(f"{folder.name}/{path} is damaged")


def read_state(folder: pathlib.Path, files: PartFiles) -> dict[str, Any]:
    """Reads the state of a part, and none of its arrays.

    Raises:
      SnapshotError: it is not what was written.
    """
    with _told_of(folder):
        check_bytes(folder, files, "state/")
        return _restore(folder, state=ocp.args.JsonRestore()).state["state"]


def read_part(folder: pathlib.Path, content: str) -> Part:
    """Reads a part; its arrays are on the host, with dtypes and shapes as they were.

    Raises:
      SnapshotError: what is read is not what was written, by its sha256.
    """
    with _told_of(folder):
        items = {"arrays": ocp.args.PyTreeRestore()} if (folder / "arrays").is_dir() else {}
        read = _restore(folder, state=ocp.args.JsonRestore(), **items)
        stored = dict(read.get("arrays") or {})
        arrays = {}
        for name, (dtype, shape) in read.state["arrays"].items():
            array = stored.pop(name) if math.prod(shape) else np.empty(shape, dtype)
            arrays[name] = np.asarray(array).reshape(shape)
        state = read.state["state"]
        if stored or _content(state, arrays) != content:
            raise SnapshotError(f"{folder}: is damaged: it does not hold what was written")
        return Part(arrays, state)


def is_part_name(name: str) -> bool:
    """Whether a part may be called so."""
    return bool(_NAME.fullmatch(name))


def files_under(folder: pathlib.Path) -> list[str]:
    """The paths, relative to the folder and sorted, of all in it that is not itself a folder."""
    return sorted(
        os.path.relpath(os.path.join(above, name), folder)
        for above, folders, names in os.walk(folder, onerror=_raise)
        for name in (*names, *(name for name in folders if os.path.islink(os.path.join(above, name))))
    )


def make_durable(folder: pathlib.Path) -> None:
    """Sees that what a folder lists is on the disk; raises OSError."""
    held = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(held)
    finally:
        os.close(held)


def reason(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    told = next(iter(str(error).splitlines()), "")
    return told or type(error).__name__


@contextlib.contextmanager
def _told_of(folder: pathlib.Path) -> Iterator[None]:
    """Whatever goes wrong below is told as a SnapshotError; of damaged files Orbax raises many kinds."""
    try:
        yield
    except SnapshotError:
        raise
    except Exception as error:
        raise SnapshotError(f"{folder}: cannot be read: {reason(error)}") from error


def _restore(folder: pathlib.Path, **items: Any) -> Any:
    with ocp.Checkpointer(_handler()) as checkpointer:
        return checkpointer.restore(folder.resolve(), ocp.args.Composite(**items))


def _handler() -> ocp.CompositeCheckpointHandler:
    return ocp.CompositeCheckpointHandler(
        arrays=ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False),
        state=ocp.JsonCheckpointHandler(),
    )


def _digest(path: pathlib.Path, durable: bool = False) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        if durable:
            os.fsync(file.fileno())
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def _content(state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps(state, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        digest.update(json.dumps([name, array.dtype.name, list(array.shape)]).encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _is_digest(told: Any) -> bool:
    return isinstance(told, str) and bool(_DIGEST.fullmatch(told))


def _raise(error: OSError) -> None:
    raise error
