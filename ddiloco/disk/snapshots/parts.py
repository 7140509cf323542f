"""The parts of a snapshot on disk: the arrays and JSON values of one process each, written by Orbax."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import math
import os
import pathlib
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from ddiloco.config import ConfigError, build
from ddiloco.disk.array_file import make_durable
from ddiloco.outer.blocks import Blocks

SYNCER_PART = "syncer"
STAGING = "staging"
"""Parts are written here before the syncer takes them in, so that one that comes too late does no harm."""

SYNCER_COPIES, LEARNER_COPIES = 3, 5
"""Copies of the parameters in a part, at most: with what optimizers and codecs keep."""

_NAME = re.compile(r"[a-z0-9_]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LARGEST_FILE = 1 << 50


class SnapshotError(Exception):
    """A snapshot or a part of it cannot be written or used; the message is one line."""


def learner_part(learner: int) -> str:
    """The name of a learner's part."""
    return f"learner_{learner:03d}"


def fragments_part(part: int) -> str:
    """The name of what a part of the syncer contributes: arrays of some of the fragments."""
    return f"fragments_{part:03d}"


def is_fragments_part(name: str) -> bool:
    """Whether a part is one that `fragments_part` names."""
    return name.startswith("fragments_")


def is_syncers(name: str) -> bool:
    """Whether a part is one of the syncer's."""
    return name == SYNCER_PART or is_fragments_part(name)


def parts_folder(snapshots: pathlib.Path) -> pathlib.Path:
    """Where the parts of a run's snapshots are written first."""
    return snapshots / STAGING


@dataclasses.dataclass(frozen=True)
class SnapshotPart:
    """What one process contributes; must not change once it is handed to a writer."""

    arrays: Mapping[str, np.ndarray | jax.Array | Blocks]  # Blocks only as one host of several reads them
    state: dict[str, Any]
    """JSON values."""


@dataclasses.dataclass(frozen=True)
class PartFiles:
    """The files of a part that was written, and their checksums."""

    # Size in bytes and sha256 of each file, by its path in the part's folder
    files: Mapping[str, tuple[int, str]]

    def to_json(self) -> dict[str, Any]:
        """As JSON values; `from_json` gives an equal one."""
        return {"files": {path: list(file) for path, file in self.files.items()}}

    @classmethod
    def from_json(cls, values: Any) -> PartFiles:
        """From what `to_json` gave; raises ValueError for anything else, or paths that lead elsewhere."""
        try:
            part = build(cls, values, "part")
        except ConfigError:
            raise ValueError("describes a part otherwise than by its files") from None
        sound = bool(part.files)
        for path, (size, digest) in part.files.items():
            names = path.split("/")
            sound &= not {"", ".", ".."} & set(names) and "\0" not in path and "\\" not in path
            sound &= 0 <= size <= _LARGEST_FILE and bool(_DIGEST.fullmatch(digest))
        if not sound:
            raise ValueError("describes a part by a path, a size or a sha256 that is none")
        return part


class PartWriter:
    """Writes the parts of one process, one after the other in its own thread. Any thread may use it."""

    def __init__(self, folder: pathlib.Path) -> None:
        """`folder`: where parts are written first; it is made when the first one is."""
        self._folder = folder
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "snapshot")
        self._lock = threading.Lock()
        self._unfinished: set[concurrent.futures.Future[PartFiles]] = set()

    def write(self, number: int, name: str, part: SnapshotPart) -> concurrent.futures.Future[PartFiles]:
        """Begins to write a part, which is durable once the future has a result.

        Parts of the same name that earlier snapshots have left in the folder are removed before that.
        The writer's thread copies arrays from devices to the host. If the part cannot be written, the future
        raises SnapshotError.
        """
        try:
            future = self._pool.submit(self._clear_and_write, self._folder / f"{number:06d}", name, part)
        except RuntimeError:
            future = concurrent.futures.Future()
            future.set_exception(SnapshotError(f"snapshot {number}, {name}: the writer is closed"))
        with self._lock:
            self._unfinished = {one for one in (*self._unfinished, future) if not one.done()}
        return future

    def _clear_and_write(self, snapshot: pathlib.Path, name: str, part: SnapshotPart) -> PartFiles:
        remove_earlier(snapshot, name)
        return self._write(snapshot, name, part)

    def _write(self, snapshot: pathlib.Path, name: str, part: SnapshotPart) -> PartFiles:
        return write_part(snapshot, name, part)

    def close(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for what is being written, and cancels the rest."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            running = [one for one in self._unfinished if not one.done()]
        concurrent.futures.wait(running, timeout)


def write_part(snapshot: pathlib.Path, name: str, part: SnapshotPart) -> PartFiles:
    """Writes a part as a new folder in its snapshot's folder; returns when it is durable.

    Raises:
      SnapshotError: the disk refuses, or Orbax cannot write what is in the part.
    """
    if not is_part_name(name):
        raise SnapshotError(f"{name!r} is no name of a part: it must be 1 to 64 of a-z, 0-9 and _")
    folder = snapshot / name
    try:
        arrays = {key: np.asarray(array) for key, array in sorted(part.arrays.items())}
        shapes = {key: [array.dtype.name, list(array.shape)] for key, array in arrays.items()}
        # Orbax returns an array without axes as a number, and refuses empty ones.
        stored = {key: array.reshape(array.shape or 1) for key, array in arrays.items() if array.size}
        snapshot.mkdir(parents=True, exist_ok=True)
        items: dict[str, Any] = {"state": ocp.args.JsonSave({"state": part.state, "arrays": shapes})}
        if stored:
            items["arrays"] = ocp.args.PyTreeSave(stored)
        with ocp.AsyncCheckpointer(_handler()) as checkpointer:
            checkpointer.save(folder.resolve(), ocp.args.Composite(**items))
            checkpointer.wait_until_finished()
        files = {path: digest_of(folder / path, durable=True) for path in files_under(folder)}
        for below in (*(path for path in folder.rglob("*") if path.is_dir()), folder, snapshot):
            make_durable(below)
        return PartFiles(files)
    except Exception as error:  # Orbax raises many kinds where the disk refuses
        raise SnapshotError(f"{folder}: cannot be written: {reason(error)}") from error


def remove_earlier(snapshot: pathlib.Path, name: str) -> None:
    """Removes what is left of a part in the folders of snapshots before this one, and nothing of others.

    The syncer does so too, but only sees its own disk. It begins a snapshot once the one before is over.
    """
    if not is_part_name(name):
        return
    with contextlib.suppress(OSError):  # a disk that refuses will be told of by the write
        for earlier in snapshot.parent.iterdir():
            if earlier.name.isdecimal() and int(earlier.name) < int(snapshot.name):
                for left in (earlier / name, *earlier.glob(f"{name}.*")):  # Orbax begins under a longer name
                    shutil.rmtree(left, ignore_errors=True)
                with contextlib.suppress(OSError):  # others' parts are in it
                    earlier.rmdir()


def check_listing(folder: pathlib.Path, files: PartFiles) -> None:
    """Raises SnapshotError unless a part's files are there with their sizes, alone; opens none."""
    with as_snapshot_error(folder):
        there = files_under(folder)
        if there != sorted(files.files):
            first = min(set(there) ^ set(files.files))
            problem = "does not belong there" if first in there else "is missing"
            raise SnapshotError(f"{folder.name}/{first} {problem}")
        for path, (size, _) in files.files.items():
            if (folder / path).stat().st_size != size:
                raise SnapshotError(f"{folder.name}/{path} is not of the size that it was written with")


def check_bytes(folder: pathlib.Path, files: PartFiles, below: str = "") -> None:
    """Raises SnapshotError if a file of a part, of those whose paths begin with `below`, is damaged."""
    with as_snapshot_error(folder):
        for path, written in files.files.items():
            if path.startswith(below) and digest_of(folder / path) != written:
                raise SnapshotError(f"{folder.name}/{path} is damaged")


def check_read(folder: pathlib.Path, files: PartFiles, path: str, data: bytes) -> None:
    """Raises SnapshotError if what was read of a file of a part is not what was written."""
    if (len(data), hashlib.sha256(data).hexdigest()) != files.files[path]:
        raise SnapshotError(f"{folder.name}/{path} is damaged")


def read_state(folder: pathlib.Path, files: PartFiles) -> dict[str, Any]:
    """The state of a part, without its arrays; raises SnapshotError if it is damaged."""
    with as_snapshot_error(folder):
        check_bytes(folder, files, "state/")
        return _restore(folder, state=ocp.args.JsonRestore()).state["state"]


def read_part(folder: pathlib.Path, files: PartFiles) -> SnapshotPart:
    """Reads a part, its arrays on the host; raises SnapshotError if it is damaged."""
    with as_snapshot_error(folder):
        check_bytes(folder, files)
        items = {"arrays": ocp.args.PyTreeRestore()} if (folder / "arrays").is_dir() else {}
        read = _restore(folder, state=ocp.args.JsonRestore(), **items)
        arrays = {}
        for name, (dtype, shape) in read.state["arrays"].items():
            array = read.arrays[name] if math.prod(shape) else np.empty(shape, dtype)
            arrays[name] = np.asarray(array).reshape(shape)
        return SnapshotPart(arrays, read.state["state"])


def is_part_name(name: str) -> bool:
    """Whether a part may have this name."""
    return bool(_NAME.fullmatch(name))


def files_under(folder: pathlib.Path) -> list[str]:
    """The sorted paths of all files and links in a folder and below, relative to it."""
    return sorted(
        os.path.relpath(os.path.join(above, name), folder)
        for above, folders, names in os.walk(folder, onerror=_raise)
        for name in (*names, *(name for name in folders if os.path.islink(os.path.join(above, name))))
    )


def reason(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    line = next(iter(str(error).splitlines()), "")
    return line or type(error).__name__


@contextlib.contextmanager
def as_snapshot_error(folder: pathlib.Path) -> Iterator[None]:
    """Turns every error into a SnapshotError: Orbax raises many kinds for a damaged file."""
    try:
        yield
    except SnapshotError:
        raise
    except Exception as error:
        raise SnapshotError(f"{folder}: cannot be read: {reason(error)}") from error


def _restore(folder: pathlib.Path, **items: Any) -> Any:
    # Alone: Orbax would wait for the learner's other hosts, which read at other times.
    alone = ocp.options.MultiprocessingOptions(jax.process_index(), {jax.process_index()})
    with ocp.Checkpointer(_handler(), multiprocessing_options=alone) as checkpointer:
        return checkpointer.restore(folder.resolve(), ocp.args.Composite(**items))


def _handler() -> ocp.CompositeCheckpointHandler:
    return ocp.CompositeCheckpointHandler(
        arrays=ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False),
        state=ocp.JsonCheckpointHandler(),
    )


def digest_of(path: pathlib.Path, durable: bool = False) -> tuple[int, str]:
    """Size and sha256 of a file, which is flushed to the disk if it is to be durable."""
    with path.open("rb") as file:
        if durable:
            os.fsync(file.fileno())
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _raise(error: OSError) -> None:
    raise error
