"""Writes a tape while its actor works; a disk that refuses ends the tape, but never the run."""

from __future__ import annotations

import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ddiloco.protocol import actions, events
from ddiloco.storage.tape import header as headers
from ddiloco.storage.tape import receipts
from ddiloco.storage.tape import tape_pb2 as pb
from ddiloco.storage.tape.entries import (
    Adopted,
    Committed,
    Content,
    CoreEvent,
    End,
    Gave,
    InnerOrigin,
    Signed,
    message_of,
    payload_of,
)
from ddiloco.storage.tape.file import HEAD_BYTES, TapeError, TapeFile, read
from ddiloco.storage.tape.header import Header
from ddiloco.telemetry import records

if TYPE_CHECKING:
    from ddiloco.storage.kept_offers import KeptOffers
    from ddiloco.storage.signing_keys import PublicKeys, Signer

FOLDER = "tape"
SUFFIX = ".tape"
BEGAN = "began"  # folder beside the tapes with the initial state of a run that was set back
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


def last_head(folder: pathlib.Path, shard: int) -> str:
    """The head of the chain of a shard's newest tape, hex; empty: there is no such tape, or it is damaged."""
    processes = reversed(range(1, next_syncer(folder)))
    newest = next((path for p in processes if (path := syncer_tape(folder, p, shard)).exists()), None)
    try:
        records = [] if newest is None else read(newest).records
    except TapeError:
        return ""
    return records[-1].head.hex() if records else ""


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

    def sync(self) -> None:
        """Makes durable what was flushed; for any thread. A disk that refuses ends the tape elsewhere."""
        file = self._file
        if file is not None:
            file.sync()

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


class Notary(NamedTuple):
    """What a shard of the syncer signs with, and checks learners' signatures by."""

    signer: Signer
    keys: PublicKeys
    kept_offers: KeptOffers | None = None  # None: none are


class SyncerTape(Recorder):
    """The events of a process of the syncer.

    Attributes:
      statements: by fragment, that on its newest version, with its signature (`receipts.join`).
      kept_offers: where merged offers are kept; None: nowhere.
    """

    def __init__(
        self,
        path: pathlib.Path | None = None,
        header: Header | None = None,
        record: Callable[[records.Record], None] = lambda record: None,
        most_bytes: float = math.inf,
        notary: Notary | None = None,
    ) -> None:
        """`notary`: None: nothing is signed."""
        super().__init__(path, header, record, most_bytes)
        self.statements: dict[int, bytes] = {}
        self.kept_offers = None if notary is None else notary.kept_offers
        self._notary, self._heads = notary, {b""}  # heads in its statements, which learners may name
        self._run = "" if header is None else header.run
        if notary is not None and header is not None:
            self._ledger = receipts.Ledger(header)
            for p, sha256 in zip(header.fragments, header.sha256, strict=True):
                self._sign(p, bytes.fromhex(sha256))

    def heard(self, event: CoreEvent, decided: Sequence[object], now: float) -> None:
        """Notes an event that the core has handled; call it before the actions are carried out.

        The contributions to a merge are written before it begins, since its result may be durable before
        this process learns of it.
        """
        self._note(event, now)
        if self._notary is not None:
            self._ledger.handled(event, decided)
        if any(isinstance(a, actions.Merge) for a in decided) or now >= self._written_at + _MAX_WAIT:
            self._written_at = now
            self.flush()

    def committed(self, fragment: int, version: int, sha256: bytes, state: bytes = b"") -> None:
        """Notes a new version, before it is broadcast; `sha256` of its pieces, `state` as in `Committed`."""
        self._note(Committed(fragment, version, sha256, state))
        self.flush()
        if self._notary is not None:
            self._sign(fragment, sha256)

    def problem(self, offer: events.FragmentArrived, sha256: Callable[[], bytes]) -> str | None:
        """Why an offer is not signed as it must be; None: it is, or need not be. For any thread.

        `sha256`: gives that of its arrays.
        """
        if self._notary is None:
            return None
        if offer.receipt.head not in self._heads:
            return "it names a head of another log"
        if offer.receipt.sha256 != sha256():
            return "its arrays are not those that were signed"
        name = f"learner-{offer.contribution.learner}"
        return self._notary.keys.problem(
            name, offer.receipt.signature, receipts.signed_offer(self._run, offer)
        )

    def _sign(self, fragment: int, sha256: bytes) -> None:
        """Makes the statement on a fragment's newest version, and the tape durable up to there."""
        if self._file is None or self._notary is None:
            self.statements.pop(fragment, None)
            return
        head = self._file.head
        statement = self._ledger.statement(fragment, sha256, self._file.records, head).to_bytes()
        signature = self._notary.signer.sign(statement)
        self._note(Signed(fragment, signature))
        self.flush()
        self.sync()
        self._heads.add(head)
        self.statements[fragment] = receipts.join(statement, signature)
