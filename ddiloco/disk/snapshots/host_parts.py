"""A learner's part of a snapshot if it has several hosts: its state, and a file of blocks from each host.

They are array files: Orbax writes arrays of host memory only in the first of JAX's processes.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from ddiloco.disk import array_file
from ddiloco.disk.snapshots.parts import (
    PartFiles,
    SnapshotPart,
    as_snapshot_error,
    check_bytes,
    check_read,
    digest_of,
)
from ddiloco.outer.blocks import Blocks, Cut, Gathered, owned

STATE = "state.json"
_MAGIC = b"ddiloco blocks of a host 1\n"

Needs = Callable[[str, tuple[int, ...]], Cut]
"""Which blocks of an array a host needs, by its name and shape."""


def file_of(host: int) -> str:
    """The name of a host's file."""
    return f"host_{host:03d}"


def write_blocks(
    folder: pathlib.Path,
    host: int,
    arrays: Mapping[str, jax.Array],
    own: Callable[[jax.Array], Blocks] = owned,
) -> PartFiles:
    """Writes the blocks that a host alone answers for into the part's folder; raises OSError."""
    blocks = {name: own(array) for name, array in arrays.items()}
    cuts = {name: [x.shape, arrays[name].dtype.name, list(x.blocks)] for name, x in blocks.items()}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_of(host)
    array_file.save(path, _MAGIC, {"cuts": cuts}, [b for x in blocks.values() for b in x.blocks.values()])
    return _files([path])


def write_state(folder: pathlib.Path, state: Mapping[str, Any]) -> PartFiles:
    """Writes the part's JSON values; raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    array_file.replace(folder / STATE, [json.dumps(state).encode()])
    return _files([folder / STATE])


def joined(parts: Iterable[PartFiles]) -> PartFiles:
    """One part of the files of several."""
    return PartFiles({name: file for part in parts for name, file in part.files.items()})


def is_of_hosts(files: PartFiles) -> bool:
    """Whether a part is one of several hosts."""
    return STATE in files.files


def read_hosts_state(folder: pathlib.Path, files: PartFiles) -> dict[str, Any]:
    """The part's JSON values; raises SnapshotError if they are damaged."""
    with as_snapshot_error(folder):
        check_bytes(folder, files, STATE)
        state: dict[str, Any] = json.loads((folder / STATE).read_bytes())
        return state


def read_hosts_part(folder: pathlib.Path, files: PartFiles, needs: Needs | None) -> SnapshotPart:
    """The state, and the needed blocks of the arrays or all.

    It reads, once and one after the other, the files of those hosts that have some of these.

    Raises:
      SnapshotError: a file is missing or damaged, or what is needed is not in them.
    """
    state = read_hosts_state(folder, files)
    with as_snapshot_error(folder):
        return SnapshotPart(_read_arrays(folder, files, needs), state)


def _read_arrays(
    folder: pathlib.Path, files: PartFiles, needs: Needs | None
) -> Mapping[str, np.ndarray | Blocks]:
    gathered: dict[str, Gathered] = {}
    for name in (file_of(host) for host in range(len(files.files) - 1)):
        cuts = _cuts(array_file.load_header(folder / name, _MAGIC), gathered, needs)
        if not any(gathered[array].wants(cut) for array, cut in cuts.items()):
            continue
        data = (folder / name).read_bytes()
        check_read(folder, files, name, data)
        left = iter(array_file.parse(data, _MAGIC)[1])
        for array, (shape, boxes) in cuts.items():
            # Copied, since of a file of many blocks a few may stay.
            gathered[array].add(Blocks(shape, {box: np.array(next(left)) for box in boxes}))
    found = {name: one.blocks() for name, one in gathered.items()}
    return found if needs is not None else {name: blocks.all for name, blocks in found.items()}


def _cuts(header: Mapping[str, Any], gathered: dict[str, Gathered], needs: Needs | None) -> dict[str, Cut]:
    """The blocks of each array in a file, by its header; arrays that are seen first go into `gathered`."""
    found = {}
    for name, (shape, dtype, boxes) in header["cuts"].items():
        if name not in gathered:
            cut = Cut.whole(shape) if needs is None else needs(name, tuple(shape))
            gathered[name] = Gathered(cut, np.dtype(dtype))
        found[name] = Cut(tuple(shape), tuple(tuple((start, stop) for start, stop in box) for box in boxes))
    return found


def _files(paths: Iterable[pathlib.Path]) -> PartFiles:
    return PartFiles({path.name: digest_of(path) for path in paths})
