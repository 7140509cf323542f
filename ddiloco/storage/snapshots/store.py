"""The snapshots of a run on disk: one is complete once it has its manifest, with the checksums of all files.

Orbax's CheckpointManager could not keep them. It takes every folder named after a step for complete, whereas
several processes write a snapshot and only the manifest says when it is whole. It would also count damaged
snapshots among those to keep.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import re
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from ddiloco.config import build
from ddiloco.protocol.clocks import VectorClock, is_consistent_cut
from ddiloco.storage import array_file
from ddiloco.storage.snapshots.parts import (
    Needs,
    PartFiles,
    PartWriter,
    SnapshotError,
    SnapshotPart,
    check_bytes,
    check_listing,
    check_names,
    is_part_name,
    read_part,
    read_state,
)
from ddiloco.storage.tape.header import SnapshotName
from ddiloco.telemetry.records import reason

__all__ = ["FOLDER", "PartFiles", "PartWriter", "Snapshot", "SnapshotError", "SnapshotPart", "SnapshotStore"]

FOLDER = "snapshots"  # of a run, in its workdir

_MANIFEST = "manifest.json"
_FORMAT = 3
_NUMBERED = re.compile(r"[0-9]{6,15}")
_OPENING = re.compile(rb'\{"sha256": "([0-9a-f]{64})", ')
_LONGEST_MANIFEST = 1 << 28


class Snapshot:
    """A complete snapshot. Reading what is damaged raises SnapshotError.

    Attributes:
      number: counts up from 1; a resumed run counts on.
      folder: where it is.
      header: JSON values: when and of which experiment it was taken.
      parts: the names of its parts.
      name: what a tape calls it by.
    """

    def __init__(
        self, folder: pathlib.Path, header: dict[str, Any], parts: Mapping[str, PartFiles], sha256: str
    ) -> None:
        """`sha256`: of the manifest, hex."""
        self.number = int(folder.name)
        self.name = SnapshotName(self.number, sha256)
        self.folder = folder
        self.header = header
        self.parts = tuple(parts)
        self._files = parts

    def part(self, name: str, needs: Needs | None = None) -> SnapshotPart:
        """A part with its arrays on the host: whole, or the blocks that one host of several needs."""
        return read_part(self.folder / name, self._file(name), needs)

    def state(self, name: str) -> dict[str, Any]:
        """The JSON values of a part, without reading its arrays; raises as `part` does."""
        return read_state(self.folder / name, self._file(name))

    def _file(self, name: str) -> PartFiles:
        if name not in self._files:
            raise SnapshotError(f"{self.folder}: has no part {name}")
        return self._files[name]


class SnapshotStore:
    """The folder of a run's snapshots; used by one thread, which decides when a snapshot is complete."""

    def __init__(self, folder: pathlib.Path, keep: int, keep_also: SnapshotName | None = None) -> None:
        """The newest `keep` complete snapshots stay, and `keep_also`, with which the run's tapes begin."""
        self.folder = folder
        self._keep = keep
        self._keep_also = None if keep_also is None else keep_also.number
        self._given = 0

    def next_number(self, least: int = 1) -> int:
        """A number above all that were given before or are on the disk; `least` or more."""
        self._given = max(self.last_number() + 1, least)
        return self._given

    def last_number(self) -> int:
        """The largest number that was given or is on the disk; 0: none.

        Of a disk that cannot be read, what was known before: the snapshot that takes a number is lost there.
        """
        with contextlib.suppress(OSError):
            self._given = max([self._given, *self._numbers()])
        return self._given

    def complete(self, number: int, header: dict[str, Any], parts: Mapping[str, PartFiles]) -> None:
        """Makes a snapshot of these parts complete; returns when it is durable.

        Then removes older ones: those beyond `keep`, and all that are incomplete. What cannot be removed now
        is tried again next time.

        Raises:
          SnapshotError: a part is missing, the states are no consistent cut, or the disk refuses.
        """
        folder = self._at(number)
        try:
            check_cut(header)
            check_names(folder, parts)
            for name, part in parts.items():
                check_listing(folder / name, part)
            array_file.replace(folder / _MANIFEST, [_encoded(number, header, parts)])
            array_file.make_durable(self.folder)
        except (OSError, ValueError, TypeError, SnapshotError) as error:
            raise SnapshotError(f"{folder}: cannot be completed: {reason(error)}") from error
        with contextlib.suppress(OSError):  # the folder cannot be listed now
            self._retain(number)

    def discard(self, number: int) -> None:
        """Removes a snapshot, as far as the disk lets it; parts that are still being written go later."""
        folder = self._at(number)
        try:
            (folder / _MANIFEST).unlink(missing_ok=True)  # first: what a crash leaves counts as incomplete
        except OSError:
            return
        shutil.rmtree(folder, ignore_errors=True)

    def newest(
        self, warn: Callable[[str], None], own: Callable[[str], bool] | None = None
    ) -> Snapshot | None:
        """The newest snapshot that `open` accepts and whose states can be read; None if there is none.

        `warn` gets a line about each one that is skipped.
        """
        for number in sorted(self._numbers(), reverse=True):
            try:
                snapshot = self.open(number, own)
                for name in snapshot.parts:
                    snapshot.state(name)
                return snapshot
            except SnapshotError as error:
                warn(f"{error}; this snapshot is skipped")
        return None

    def open(self, number: int, own: Callable[[str], bool] | None = None) -> Snapshot:
        """A complete snapshot: all its files are there, with their sizes; raises SnapshotError.

        `own`: whether to check a part, by its name, byte by byte; None: all are.
        """
        folder = self._at(number)
        try:
            header, parts, sha256 = _manifest(folder)
            check_cut(header)
            check_names(folder, {_MANIFEST, *parts})
            for name, part in parts.items():
                check_listing(folder / name, part)
                if own is None or own(name):
                    check_bytes(folder / name, part)
        except FileNotFoundError:
            raise SnapshotError(f"{folder}: is incomplete: it has no {_MANIFEST}") from None
        except (OSError, ValueError, SnapshotError) as error:
            raise SnapshotError(f"{folder}: cannot be used: {reason(error)}") from None
        return Snapshot(folder, header, parts, sha256)

    def _retain(self, newest: int) -> None:
        complete = 0
        for number in sorted(self._numbers(), reverse=True):
            if number > newest:
                continue
            try:
                _manifest(self._at(number))
            except (FileNotFoundError, ValueError):
                self.discard(number)
                continue
            except OSError:  # it may well be complete: a disk that cannot be read now
                continue
            complete += 1
            if complete > self._keep and number != self._keep_also:
                self.discard(number)

    def _numbers(self) -> list[int]:
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        numbers = [int(name) for name in names if _NUMBERED.fullmatch(name)]
        return [number for number in numbers if self._at(number).name in names]

    def _at(self, number: int) -> pathlib.Path:
        return self.folder / f"{number:06d}"


@dataclasses.dataclass(frozen=True)
class Clocks:
    """The entry `clocks` of a header: the syncer's clock, and the recorded learners' by number."""

    syncer: VectorClock
    learners: Mapping[int, VectorClock]


def check_cut(header: Mapping[str, Any]) -> None:
    """Raises ValueError if states are no consistent cut; a header without `clocks` is of one state."""
    if "clocks" not in header:
        return
    clocks = build(Clocks, header["clocks"], "clocks")
    if not is_consistent_cut(clocks.syncer, clocks.learners):
        raise ValueError("is no consistent cut: a state in it holds work that its owner has yet to do")


def _encoded(number: int, header: dict[str, Any], parts: Mapping[str, PartFiles]) -> bytes:
    manifest = {
        "format": _FORMAT,
        "number": number,
        "header": header,
        "parts": {name: part.to_json() for name, part in parts.items()},
    }
    rest = json.dumps(manifest, indent=1)[1:].lstrip().encode() + b"\n"
    return b'{"sha256": "' + hashlib.sha256(rest).hexdigest().encode() + b'", ' + rest


def _manifest(folder: pathlib.Path) -> tuple[dict[str, Any], dict[str, PartFiles], str]:
    """Header, parts and SHA-256 of a manifest; raises OSError, or ValueError if it is damaged."""
    path = folder / _MANIFEST
    if path.stat().st_size > _LONGEST_MANIFEST:
        raise ValueError(f"{_MANIFEST} is longer than any")
    data = path.read_bytes()
    opening = _OPENING.match(data)
    if opening is None or hashlib.sha256(data[opening.end() :]).hexdigest().encode() != opening[1]:
        raise ValueError(f"{_MANIFEST} is damaged")
    try:
        values = json.loads(data)
        form, number = values["format"], values["number"]
        header, parts = dict(values["header"]), values["parts"]
        files = {name: PartFiles.from_json(part) for name, part in parts.items() if is_part_name(name)}
    except (AttributeError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{_MANIFEST} is none") from None
    if form != _FORMAT:
        raise ValueError(f"{_MANIFEST} is of format {form!r}, but must be of {_FORMAT}")
    if number != int(folder.name) or len(files) != len(parts):
        raise ValueError(f"{_MANIFEST} is of another snapshot, number {number!r}")
    return header, files, opening[1].decode()
