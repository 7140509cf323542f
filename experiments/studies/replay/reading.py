"""The tapes of a run, read back: one for each process, in the order in which the processes ran."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from ddiloco.storage.tape.entries import End, Entry, entries_of, record_of
from ddiloco.storage.tape.file import Content, TapeError, read
from ddiloco.storage.tape.header import Header, from_json
from ddiloco.storage.tape.recorder import BEGAN, FOLDER, SUFFIX


@dataclasses.dataclass(frozen=True)
class Tape:
    """One tape."""

    path: pathlib.Path  # its file
    header: Header  # its first record
    entries: list[Entry]  # all others, in order
    torn: int = 0  # bytes of an unfinished last record, which is left out
    # By record, the header's first: the number of entries up to its end, and the chain's head there
    records: Sequence[tuple[int, bytes]] = ()

    @property
    def ended(self) -> bool:
        """Whether the process ended by itself."""
        return bool(self.entries) and isinstance(self.entries[-1].content, End)

    def wall(self, now: float) -> float:
        """Unix seconds at a time of this tape's clock; virtual seconds in virtual time."""
        return self.header.wall + (now - self.header.now)


@dataclasses.dataclass(frozen=True)
class RunTapes:
    """All tapes of a run."""

    syncers: list[Tape]  # the syncer's processes, in order: the first begins the run
    learners: dict[int, list[Tape]]  # each learner's processes, in order, by its number
    warnings: list[str]  # a line about each tape that was cut
    began: pathlib.Path | None = None  # folder of the state from before these tapes; None: there is none


def begins(syncers: Sequence[Tape]) -> dict[int, int]:
    """By fragment, the version from which the first of these processes that had the fragment began."""
    found: dict[int, int] = {}
    for header in (tape.header for tape in syncers):
        found = {p: header.state.versions[p] for p in header.fragments} | found
    return found


def read_tape(path: pathlib.Path) -> Tape | None:
    """A tape; None if its process was killed before it had a header. Raises TapeError if it is damaged."""
    return tape_of(path, read(path))


def tape_of(path: pathlib.Path, content: Content) -> Tape | None:
    """Like `read_tape`, from what the file holds."""
    if not content.records:
        return None
    entries, header, records = [], None, []
    for at, payload, head in content.records:
        try:
            if header is None:
                header = from_json(record_of(payload).header)
            else:
                entries += entries_of(payload)
        except Exception as error:  # protobuf documents none
            raise TapeError(f"{path}: byte {at}: holds {error}") from None
        records.append((len(entries), head))
    return Tape(path, header, entries, content.torn, records)


def read_histories(workdir: pathlib.Path, config: str) -> list[tuple[list[Tape], bool]]:
    """The syncer's tapes of a run, and of histories before rollbacks, oldest first, of these settings.

    Each with whether it continues from a rollback. Raises TapeError if there are none, one is
    damaged, or is of other settings.
    """
    found = []
    for folder in (*sorted(workdir.glob(f"previous/*/{FOLDER}")), workdir / FOLDER):
        paths = [*sorted(folder.glob(f"syncer-*{SUFFIX}")), *sorted(folder.glob(f"shard-*{SUFFIX}"))]
        tapes = [tape for path in paths if (tape := read_tape(path)) is not None]
        found.append((tapes, (folder / BEGAN).exists()))
    newest, _ = found[-1]
    if not newest:
        raise TapeError(f"{workdir / FOLDER}: holds no tape of a syncer")
    for tape in newest:
        if tape.header.config != config:
            raise TapeError(f"{tape.path}: is of other settings than config.json")
        if tape.header.run != newest[0].header.run:
            raise TapeError(f"{tape.path}: is of another run than the tapes beside it")
    run = newest[0].header.run
    return [(tapes, set_back) for tapes, set_back in found if tapes and tapes[0].header.run == run]


def read_run(workdir: pathlib.Path) -> RunTapes:
    """The tapes in a run's folder; raises TapeError if there are none, or one is damaged."""
    folder = workdir / FOLDER
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise TapeError(f"{folder}: holds no tapes; baselines and runs without arrays write none")
    tapes, warnings = [], []
    for path in paths:
        tape = read_tape(path)
        if tape is None:
            warnings.append(f"{path}: is empty: its process was killed at once")
            continue
        if tape.torn:
            warnings.append(f"{path}: {tape.torn} bytes of a record that was being written are cut off")
        tapes.append(tape)
    runs = {tape.header.run: tape for tape in tapes}
    if len(runs) > 1:
        raise TapeError(f"{[*runs.values()][-1].path}: is of another run than the tapes beside it")
    tapes.sort(key=lambda t: (t.header.process, t.header.shard))  # shards may begin at once, with one number
    syncers = [tape for tape in tapes if tape.header.learner is None]
    learners: dict[int, list[Tape]] = {}
    for tape in tapes:
        if tape.header.learner is not None:
            learners.setdefault(tape.header.learner, []).append(tape)
    if not syncers:
        raise TapeError(f"{folder}: holds no tape of a syncer")
    began = folder / BEGAN
    return RunTapes(syncers, dict(sorted(learners.items())), warnings, began if began.exists() else None)
