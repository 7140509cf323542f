"""The state that each shard of the syncer shares with the others, in a small file of its own."""

from __future__ import annotations

import json
import pathlib
from typing import NamedTuple

from ddiloco.storage import array_file

PREFIX = "shard-"


class ShardState(NamedTuple):
    """The state written by the shard's newest process."""

    start: str  # of the run, as in its mark; states of other starts are void
    shards: int  # S, the number of shards
    address: str  # HOST:PORT at which it answers learners
    finished: int = 0  # the run's last step, once all of the shard's rounds are over; 0: they are not
    over: bool = False  # its process has ended, and the run with it
    versions: tuple[int, ...] = ()  # of its fragments, as it ended

    def save(self, folder: pathlib.Path, shard: int) -> None:
        """Makes it durable; raises OSError."""
        array_file.replace(_path(folder, shard), [json.dumps(self._asdict()).encode()])


def load(folder: pathlib.Path, shard: int) -> ShardState | None:
    """The state of a shard; None: not readable."""
    try:
        values = json.loads(_path(folder, shard).read_text())
        start, address = str(values["start"]), str(values["address"])
        versions = tuple(map(int, values["versions"]))
        numbers = int(values["finished"]), bool(values["over"])
        return ShardState(start, int(values["shards"]), address, *numbers, versions)
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None


def sweep(folder: pathlib.Path, shard: int) -> None:
    """Removes what a killed process of the shard left unfinished of its file."""
    array_file.sweep(folder, _path(folder, shard).name)


def _path(folder: pathlib.Path, shard: int) -> pathlib.Path:
    return folder / f"{PREFIX}{shard:04d}.json"
