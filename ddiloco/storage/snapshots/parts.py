"""The parts of a snapshot on disk: the arrays and JSON values of the syncer, or of a learner, one each.

A part is a folder with the values and files of arrays: of a learner one of each host's blocks, of the syncer
one a fragment. It is read by any number of hosts: each reads the files that have something for it, one after
the other, and keeps what it needs.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ddiloco.arrays.blocks import Blocks, Box, Cut, Gathered, overlap, owned
from ddiloco.arrays.finite import NotFiniteError, check_finite, check_state
from ddiloco.config import ConfigError, build
from ddiloco.storage import array_file
from ddiloco.storage.array_names import is_kind
from ddiloco.telemetry.records import reason

SYNCER_PART = "syncer"
STAGING = "staging"
"""Parts are written here before the syncer takes them in, so that one that comes too late does no harm."""

SYNCER_COPIES, LEARNER_COPIES = 3, 5
"""Copies of the parameters in a part, at most: with what optimizers and codecs keep."""

Needs = Callable[[str, tuple[int, ...]], Cut]
"""Which blocks of an array a host needs, by its name and shape."""

Array = np.ndarray | jax.Array | Blocks
"""What a process has of an array; `Blocks`: as one host of several."""

_STATE = "state.json"
_MAGIC = b"ddiloco blocks of a host 2\n"
_NAME = re.compile(r"[a-z0-9_]{1,64}")
_FILE = re.compile(r"state\.json|(host|fragment)_[0-9]{3,6}")
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

    arrays: Mapping[str, Array]
    state: dict[str, Any]
    """JSON values."""


@dataclasses.dataclass(frozen=True)
class PartFiles:
    """The files of a part that was written, and their checksums."""

    # Size in bytes and sha256 of each file, by its name
    files: Mapping[str, tuple[int, str]]

    def to_json(self) -> dict[str, Any]:
        """As JSON values; `from_json` gives an equal one."""
        return {"files": {name: list(file) for name, file in self.files.items()}}

    @classmethod
    def from_json(cls, values: Any) -> PartFiles:
        """From what `to_json` gave; raises ValueError for anything else."""
        try:
            part = build(cls, values, "part")
        except ConfigError:
            raise ValueError("describes a part otherwise than by its files") from None
        sound = bool(part.files)
        for name, (size, digest) in part.files.items():
            sound &= bool(_FILE.fullmatch(name) and _DIGEST.fullmatch(digest) and 0 <= size <= _LARGEST_FILE)
        if not sound:
            raise ValueError("describes a part by a name, a size or a sha256 that is none")
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
        future.add_done_callback(_let_go)
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


def _let_go(done: concurrent.futures.Future[PartFiles]) -> None:
    """Clears the frames that a failure keeps: who looks at it later would hold all arrays of the part."""
    error = None if done.cancelled() else done.exception()
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def write_part(snapshot: pathlib.Path, name: str, part: SnapshotPart) -> PartFiles:
    """Writes a part, of several hosts the first one's blocks; returns when it is durable.

    Raises:
      SnapshotError: the disk refuses, or the devices.
    """
    if not is_part_name(name):
        raise SnapshotError(f"{name!r} is no name of a part: it must be 1 to 64 of a-z, 0-9 and _")
    folder = snapshot / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        blocks = [write_blocks(folder, file, arrays) for file, arrays in _by_file(part.arrays).items()]
        array_file.replace(folder / _STATE, [json.dumps(part.state).encode()])
        array_file.make_durable(snapshot)
        return joined([*blocks, PartFiles({_STATE: digest_of(folder / _STATE)})])
    except Exception as error:
        raise SnapshotError(f"{folder}: cannot be written: {reason(error)}") from error


def _by_file(arrays: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    """The arrays by file; the syncer's by fragment: a learner that lacks an update reads that alone."""
    files: dict[str, dict[str, Array]] = {}
    for name, array in arrays.items():
        kind, _, rest = name.partition("/")
        of_syncer = kind in ("fragment", "outer")
        file = f"fragment_{int(rest.partition('/')[0]):03d}" if of_syncer else file_of(0)
        files.setdefault(file, {})[name] = array
    return files


def write_blocks(folder: pathlib.Path, file: str, arrays: Mapping[str, Array]) -> PartFiles:
    """Writes the blocks that a process alone answers for into a file of the part's; raises OSError."""
    own = {name: owned(array) for name, array in arrays.items()}
    listed = [(name, one.shape, box) for name, one in own.items() for box in one.blocks]
    blocks = [block for one in own.values() for block in one.blocks.values()]
    array_file.save(folder / file, _MAGIC, {"blocks": listed}, blocks)
    return PartFiles({file: digest_of(folder / file)})


def file_of(host: int) -> str:
    """The name of the file with a host's blocks."""
    return f"host_{host:03d}"


def joined(parts: Iterable[PartFiles]) -> PartFiles:
    """One part of the files of several."""
    return PartFiles({name: file for part in parts for name, file in part.files.items()})


def remove_earlier(snapshot: pathlib.Path, name: str) -> None:
    """Removes what is left of a part in the folders of snapshots before this one, and nothing of others.

    The syncer does so too, but only sees its own disk. It begins a snapshot once the one before is over.
    """
    if not is_part_name(name):
        return
    with contextlib.suppress(OSError):  # a disk that refuses will be told of by the write
        for earlier in snapshot.parent.iterdir():
            if earlier.name.isdecimal() and int(earlier.name) < int(snapshot.name):
                shutil.rmtree(earlier / name, ignore_errors=True)
                with contextlib.suppress(OSError):  # others' parts are in it
                    earlier.rmdir()


def check_listing(folder: pathlib.Path, files: PartFiles) -> None:
    """Raises SnapshotError unless a part's files are there with their sizes, alone; opens none."""
    with as_snapshot_error(folder):
        check_names(folder, files.files)
        for name, (size, _) in files.files.items():
            if (folder / name).stat().st_size != size:
                raise SnapshotError(f"{folder.name}/{name} is not of the size that it was written with")


def check_names(folder: pathlib.Path, names: Iterable[str]) -> None:
    """Raises SnapshotError unless files or folders of these names are in a folder, alone; or OSError."""
    there = set(os.listdir(folder))
    for name in sorted(there ^ set(names)):
        problem = "does not belong there" if name in there else "is missing"
        raise SnapshotError(f"{folder.name}/{name} {problem}")


def check_bytes(folder: pathlib.Path, files: PartFiles) -> None:
    """Raises SnapshotError if a file of a part is damaged, or holds numbers that are not finite."""
    with as_snapshot_error(folder):
        for path, written in files.files.items():
            if digest_of(folder / path) != written:
                raise SnapshotError(f"{folder.name}/{path} is damaged")
            if path != _STATE:
                header, blocks = array_file.mapped(folder / path, _MAGIC)
                _check_finite(folder, path, header, blocks)


def read_state(folder: pathlib.Path, files: PartFiles) -> dict[str, Any]:
    """The state of a part, without its arrays; raises SnapshotError if it is damaged."""
    with as_snapshot_error(folder):
        state: dict[str, Any] = json.loads(_read(folder, files, _STATE))
        return state


def read_part(folder: pathlib.Path, files: PartFiles, needs: Needs | None = None) -> SnapshotPart:
    """Reads a part, its arrays on the host: whole, or the blocks that one host of several needs.

    Raises:
      SnapshotError: what is read is damaged or not finite, or has not all that is needed.
    """
    state = read_state(folder, files)
    with as_snapshot_error(folder):
        gathered: dict[str, Gathered] = {}
        for path in sorted(files.files.keys() - {_STATE}):
            if needs is not None and not _has_any(folder / path, needs):
                continue
            header, blocks = array_file.parse(_read(folder, files, path), _MAGIC)
            _check_finite(folder, path, header, blocks)
            for (name, shape, box), block in zip(header["blocks"], blocks, strict=True):
                cut = Cut.whole(shape) if needs is None else needs(name, tuple(shape))
                found = Blocks(shape, {_box(box): block})
                if needs is not None:  # copied, or a part of a block would keep all bytes of the file
                    found = found.within(cut).map(lambda _, part: np.array(part))
                gathered.setdefault(name, Gathered(cut, block.dtype)).add(found)
        arrays = {name: one.blocks() for name, one in gathered.items()}
        whole = {name: one.all for name, one in arrays.items()} if needs is None else arrays
        return SnapshotPart(whole, state)


def _check_finite(
    folder: pathlib.Path, path: str, header: Mapping[str, Any], blocks: Sequence[np.ndarray]
) -> None:
    """Raises SnapshotError, which names the array, if a file holds numbers that are not finite."""
    named = [(name, block) for (name, _, _), block in zip(header["blocks"], blocks, strict=True)]
    try:
        for inner, check in ((True, check_state), (False, check_finite)):
            check((name, block) for name, block in named if is_kind("inner", name) == inner)
    except NotFiniteError as error:
        raise SnapshotError(f"{folder.name}/{path}: {error}") from None


def _has_any(path: pathlib.Path, needs: Needs) -> bool:
    """Whether a host's file has some block of those that another one needs."""
    return any(
        overlap(_box(box), needed) is not None
        for name, shape, box in array_file.load_header(path, _MAGIC)["blocks"]
        for needed in needs(name, tuple(shape)).boxes
    )


def _box(bounds: Sequence[Sequence[int]]) -> Box:
    return tuple((start, stop) for start, stop in bounds)


def _read(folder: pathlib.Path, files: PartFiles, path: str) -> bytes:
    """A file of a part; raises SnapshotError if that is not what was written."""
    data = (folder / path).read_bytes()
    if (len(data), hashlib.sha256(data).hexdigest()) != files.files[path]:
        raise SnapshotError(f"{folder.name}/{path} is damaged")
    return data


def is_part_name(name: str) -> bool:
    """Whether a part may have this name."""
    return bool(_NAME.fullmatch(name))


@contextlib.contextmanager
def as_snapshot_error(folder: pathlib.Path) -> Iterator[None]:
    """Turns every error into a SnapshotError: a damaged file raises many kinds."""
    try:
        yield
    except SnapshotError:
        raise
    except Exception as error:
        raise SnapshotError(f"{folder}: cannot be read: {reason(error)}") from error


def digest_of(path: pathlib.Path) -> tuple[int, str]:
    """Size and sha256 of a file."""
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
