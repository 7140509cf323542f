"""Writes a tape while its actor works; a disk that refuses ends the tape, but never the run."""

from __future__ import annotations

import math
import pathlib
import time
from collections.abc import Callable, Sequence

from ddiloco.protocol import actions, events
from ddiloco.storage.tape import header as headers
from ddiloco.storage.tape import tape_pb2 as pb
from ddiloco.storage.tape.entries import (
    Adopted,
    Committed,
    Content,
    CoreEvent,
    End,
    Gave,
    InnerOrigin,
    message_of,
    payload_of,
)
from ddiloco.storage.tape.file import HEAD_BYTES, TapeFile
from ddiloco.storage.tape.header import Header
from ddiloco.telemetry import records

FOLDER = "tape"
SUFFIX = ".tape"
BEGAN = "began"  # folder beside the tapes, of what the run went on with where they do not begin with it
_MAX_WAIT = 1.0  # seconds that the syncer's entries may wait to be written if nothing depends on them


def learner_tape(folder: pathlib.Path, learner: int, process: int) -> pathlib.Path:
    """The file of a learner's process."""
    return folder / f"learner-{learner}-{process}{SUFFIX}"


def syncer_tape(folder: pathlib.Path, process: int, shard: int = 0) -> pathlib.Path:
    """The file of a process of the syncer, or of one of its shards."""
    return folder / (f"shard-{shard}-{process}{SUFFIX}" if shard else f"syncer-{process}{SUFFIX}")


def next_syncer(folder: pathlib.Path) -> int:
    """The number of the syncer's next process, of whichever shard; two may begin at once with the same."""
    paths = (*folder.glob(f"syncer-*{SUFFIX}"), *folder.glob(f"shard-*-*{SUFFIX}"))
    numbers = (path.stem.rpartition("-")[2] for path in paths)
    return 1 + max((int(number) for number in numbers if number.isdigit()), default=0)


class Recorder:
    """A tape that is being written, or none. Used by its actor's thread alone."""

    def __init__(
        self,
        path: pathlib.Path | None = None,
        header: Header | None = None,
        record: Callable[[records.Record], None] = lambda record: None,
        max_bytes: float = math.inf,
    ) -> None:
        """Begins the file.

        Args:
          path: of the file; None: nothing is written, and `header` is not needed.
          header: the first record.
          record: gets an alarm if the disk refuses.
          max_bytes: the tape ends before it is longer, with an alarm.
        """
        self._path, self._record = path, record
        self._left = max_bytes
        self._file: TapeFile | None = None
        self._waiting: list[pb.Entry] = []
        self._written_at = 0.0
        if path is not None:
            try:
                self._file = TapeFile(path)
                self._append(pb.Record(header=headers.to_json(header)))
            except OSError as error:
                self._fail(error)

    @property
    def on(self) -> bool:
        """Whether anything is written."""
        return self._file is not None

    def flush(self) -> None:
        """Hands what was noted to the operating system, so that it outlives this process."""
        if self._waiting and self._file is not None:
            waiting, self._waiting = self._waiting, []
            self._append(pb.Record(entries=waiting))

    def end(self, versions: Sequence[int] = ()) -> None:
        """Writes that the process ended by itself, and closes the file."""
        self._note(End(tuple(versions)))
        self.close()

    def close(self) -> None:
        """Writes what was noted, and closes the file."""
        self.flush()
        self._close()

    def _note(self, content: Content, now: float | None = None) -> None:
        if self._file is None:
            return
        try:
            self._waiting.append(message_of(content, now))
        except ValueError as error:
            self._fail(error)

    def _append(self, message: pb.Record) -> None:
        payload = payload_of(message)
        self._left -= HEAD_BYTES + len(payload)
        try:
            if self._left < 0:
                raise ValueError("it has grown to its largest size")
            self._file.append(payload)
        except (OSError, ValueError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._close()
        reason = getattr(error, "strerror", None) or str(error).removeprefix(f"{self._path}: ")
        problem = f"{self._path}: {reason}: the tape ends here, and the run cannot be replayed beyond it"
        self._record(records.Alarm(problem, time.time()))

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
        self._waiting.clear()


class LearnerTape(Recorder):
    """The events of a learner's process; they are written at once, but a started step only with the next."""

    def __init__(
        self,
        learner: int,
        process: int,
        path: pathlib.Path | None = None,
        header: Header | None = None,
        record: Callable[[records.Record], None] = lambda record: None,
        max_bytes: float = math.inf,
    ) -> None:
        super().__init__(path, header, record, max_bytes)
        self._learner, self._process = learner, process
        self._given = 0

    def heard(self, event: events.LearnerEvent, now: float) -> None:
        """Notes an event that the core has handled; call it before the actions are carried out."""
        self._note(event, now)
        if not isinstance(event, events.StepStarted):  # no other process sees a step before it is finished
            self.flush()

    def adopted(self, fresh: bool, origin: InnerOrigin | None) -> None:
        """Notes the inner state that the learner adopted; `origin` if it is not a fresh one."""
        self._note(Adopted(origin, fresh))

    def gave(self) -> InnerOrigin:
        """Notes that a copy of the inner state is given away now; gives its name."""
        self._given += 1
        self._note(Gave(self._given))
        self.flush()
        return InnerOrigin(self._learner, self._process, self._given)

    def sync(self) -> None:
        """Makes durable what was flushed; for any thread. A disk that refuses ends the tape elsewhere."""
        file = self._file
        if file is not None:
            file.sync()


class SyncerTape(Recorder):
    """The events of a process of the syncer."""

    def heard(self, event: CoreEvent, decided: Sequence[object], now: float) -> None:
        """Notes an event that the core has handled; call it before the actions are carried out.

        The contributions to a merge are written before it begins, since its result may be durable before
        this process learns of it.
        """
        self._note(event, now)
        if any(isinstance(a, actions.Merge) for a in decided) or now >= self._written_at + _MAX_WAIT:
            self._written_at = now
            self.flush()

    def committed(self, fragment: int, version: int, sha256: bytes) -> None:
        """Notes a new version, before it is broadcast; `sha256` of its pieces."""
        self._note(Committed(fragment, version, sha256))
        self.flush()
