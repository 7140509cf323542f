"""The part in a snapshot of a learner of several hosts: each writes its blocks of the same step boundary."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable, Mapping

import jax

from ddiloco.remote.learner.followers import Followers
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.validation import WireError
from ddiloco.storage.learner_state import StateOfAllHosts
from ddiloco.storage.snapshots.parts import (
    PartFiles,
    PartWriter,
    SnapshotError,
    SnapshotPart,
    file_of,
    joined,
    learner_part,
    parts_folder,
    remove_earlier,
    write_blocks,
)
from ddiloco.storage.snapshots.store import FOLDER
from ddiloco.telemetry.records import reason


class HostPartWriter(PartWriter):
    """Writes host 0's blocks and the state, and has the other hosts write their blocks beside them."""

    def __init__(self, folder: pathlib.Path, followers: Followers, patience: Callable[[], float]) -> None:
        """`patience`: seconds to wait for the others."""
        super().__init__(folder)
        self._followers, self._patience = followers, patience

    def _write(self, snapshot: pathlib.Path, name: str, part: SnapshotPart) -> PartFiles:
        copies = part.arrays
        assert isinstance(copies, StateOfAllHosts)
        order = pb.Order.Write(copy=copies.number, snapshot=int(snapshot.name))
        try:
            with self._followers.doing(copies.number, pb.Order(write=order)):
                own = super()._write(snapshot, name, part)
                others = self._followers.done(copies.number, time.monotonic() + self._patience())
            return joined([own, *(PartFiles.from_json(json.loads(one.files)) for one in others)])
        except (ValueError, WireError) as error:
            raise SnapshotError(f"{snapshot / name}: cannot be written: {reason(error)}") from error


def write_own(
    workdir: pathlib.Path, snapshot: int, learner: int, host: int, arrays: Mapping[str, jax.Array]
) -> str:
    """Another host's blocks in the learner's part: JSON of its files. Raises OSError."""
    folder = parts_folder(workdir / FOLDER) / f"{snapshot:06d}" / learner_part(learner)
    remove_earlier(folder.parent, folder.name)
    folder.mkdir(parents=True, exist_ok=True)
    return json.dumps(write_blocks(folder, file_of(host), arrays).to_json())
