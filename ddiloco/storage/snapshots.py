"""The snapshots of a run: numbered folders of whole files, each complete once it has its header.

    snapshots/000003/syncer/                 the syncer's folder: fragments, incarnations, the run's mark
    snapshots/000003/learners/<m>/state.*    a checkpoint of each learner
    snapshots/000003/snapshot.json           the header, written last: step, settings, what belongs to it

Learners that keep their checkpoints elsewhere have their part of a snapshot there, under the same names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

from ddiloco.config import build
from ddiloco.storage import array_file, checksummed_json
from ddiloco.storage.learner_state import MAGIC, SNAPSHOTS
from ddiloco.storage.run_mark import FRAGMENT
from ddiloco.telemetry.records import reason

FOLDER = SNAPSHOTS  # of a run, in its workdir
LEARNERS, SYNCER = "learners", "syncer"

_HEADER = "snapshot.json"


class SnapshotError(Exception):
    """A snapshot cannot be used; the message is one line and names it."""


@dataclasses.dataclass(frozen=True)
class SnapshotHeader:
    """The description of a snapshot.

    Attributes:
      run: the run's id, hex.
      step: the newest global step that was merged.
      time: unix seconds.
      learners: those whose checkpoints are in it.
      experiment: the run's settings, JSON.
      files: below the snapshot's folder, by name, their bytes.
    """

    run: str
    step: int
    time: float
    learners: tuple[int, ...]
    experiment: Mapping[str, Any]
    files: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A complete snapshot."""

    folder: pathlib.Path
    header: SnapshotHeader

    def check(self) -> None:
        """Reads every file. Raises SnapshotError: one is missing or damaged."""
        for name, size in self.header.files.items():
            path = self.folder / name
            try:
                if path.stat().st_size != size:
                    raise ValueError(f"has {path.stat().st_size} bytes, and had {size}")
                if path.name.startswith("fragment-"):
                    array_file.load(path, FRAGMENT)
                elif path.parent.parent.name == LEARNERS:
                    array_file.load(path, MAGIC)
                else:
                    path.read_bytes()
            except (OSError, ValueError) as error:
                why = reason(error).removeprefix(f"{path}: ")
                raise SnapshotError(f"{self.folder}: cannot be used: {name}: {why}") from None


class SnapshotStore:
    """The folder of a run's snapshots, for one thread at a time."""

    def __init__(self, folder: pathlib.Path, keep: int) -> None:
        """The newest `keep` complete snapshots stay."""
        self.folder, self._keep = folder, keep

    def begin(self) -> int:
        """The number of a new snapshot, above all that were begun before. Raises OSError."""
        number = 1 + max(self._numbers(), default=0)
        self.at(number).mkdir(parents=True)
        return number

    def at(self, number: int) -> pathlib.Path:
        """The folder of the snapshot with this number."""
        return self.folder / f"{number:06d}"

    def complete(self, number: int, header: SnapshotHeader) -> Snapshot:
        """Makes a snapshot of what is in its folder complete; returns when it is durable.

        Then removes older ones: those beyond `keep`, and all that are incomplete. Raises OSError.
        """
        folder = self.at(number)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name[0] != "."]
        sizes = {f"{path.relative_to(folder)}": path.stat().st_size for path in files}
        header = dataclasses.replace(header, files=sizes)
        for inside in {path.parent for path in files}:
            array_file.make_durable(inside)
        checksummed_json.save(folder / _HEADER, dataclasses.asdict(header))
        array_file.make_durable(self.folder)
        with contextlib.suppress(OSError):  # the folder cannot be listed now
            self._retain(number)
        return Snapshot(folder, header)

    def discard(self, number: int) -> None:
        """Removes a snapshot, as far as the disk lets it."""
        with contextlib.suppress(OSError):
            (self.at(number) / _HEADER).unlink(missing_ok=True)  # first: what is left then is incomplete
            shutil.rmtree(self.at(number), ignore_errors=True)

    def open(self, number: int) -> Snapshot:
        """A complete snapshot, whose files are not checked yet. Raises SnapshotError: there is none."""
        folder = self.at(number)
        try:
            values = checksummed_json.load(folder / _HEADER)
            return Snapshot(folder, build(SnapshotHeader, values, "snapshot"))
        except FileNotFoundError:
            complete = [str(n) for n in self._numbers() if (self.at(n) / _HEADER).exists()]
            known = f"complete are {', '.join(complete)}" if complete else "there is no complete one"
            raise SnapshotError(f"{folder}: is not there, or incomplete: {known}") from None
        except (OSError, ValueError) as error:
            raise SnapshotError(f"{folder}: cannot be used: {_HEADER}: {reason(error)}") from None

    def later(self, number: int) -> list[pathlib.Path]:
        """The folders of snapshots with larger numbers."""
        return [self.at(n) for n in self._numbers() if n > number]

    def _retain(self, newest: int) -> None:
        before = [number for number in self._numbers() if number < newest]
        complete = [number for number in before if (self.at(number) / _HEADER).exists()]
        stay = complete[len(complete) - self._keep + 1 :] if self._keep > 1 else []
        for number in before:
            if number not in stay:
                self.discard(number)

    def _numbers(self) -> list[int]:
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(int(name) for name in names if name.isdigit() and self.at(int(name)).name == name)
