"""The entries of a tape, in Python and as bytes: events of the cores, and notes on arrays."""

from __future__ import annotations

import dataclasses
import zlib

from google.protobuf.message import DecodeError

from ddiloco.schema import codec
from ddiloco.storage.tape import tape_pb2 as pb

_LONGEST = 1 << 28  # bytes of a record; a few that are damaged must not become any number in memory


@dataclasses.dataclass(frozen=True, order=True)
class InnerOrigin:
    """The source of an inner optimizer state: a learner's process, and the number of its transfer, from 1."""

    learner: int
    process: int
    number: int

    def __str__(self) -> str:
        return f"inner state {self.number} of learner {self.learner}'s process {self.process}"


@dataclasses.dataclass(frozen=True)
class Adopted:
    """A learner adopted this inner state. None: a fresh one; if `fresh` is False, one of unknown origin."""

    origin: InnerOrigin | None
    fresh: bool


@dataclasses.dataclass(frozen=True)
class Gave:
    """A learner gave a copy of its inner state, after the last step it had started."""

    number: int


@dataclasses.dataclass(frozen=True)
class Committed:
    """A fragment's new version, with the SHA-256 of its pieces.

    `state` is that of its outer optimizer's state; empty unless offers are kept (`remote.keep_offers`).
    """

    fragment: int
    version: int
    sha256: bytes
    state: bytes = b""


@dataclasses.dataclass(frozen=True)
class Signed:
    """The syncer's signature under its statement on the fragment's newest version (`receipts.Ledger`)."""

    fragment: int
    signature: bytes


@dataclasses.dataclass(frozen=True)
class End:
    """The process ended by itself; the syncer's notes the versions of its fragments."""

    versions: tuple[int, ...] = ()


Note = Adopted | Gave | Committed | Signed | End
CoreEvent = codec.Event
"""What a core is told."""

Content = CoreEvent | Note


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of a tape. `now`: seconds, as given to the core; None for a note."""

    now: float | None
    content: Content


def message_of(content: Content, now: float | None = None) -> pb.Entry:
    """The message of an entry. Raises ValueError if a number has more than 64 bits."""
    match content:
        case Adopted() | Gave() | Committed() | Signed() | End():
            kind = {type(content).__name__.lower(): dataclasses.asdict(content)}
        case _:
            kind = {"event": codec.message_of(content)}
    return pb.Entry(now=now or 0.0, **kind)


def payload_of(record: pb.Record) -> bytes:
    """The bytes of a record on a tape, compressed: most of a report is as in the one before."""
    return zlib.compress(record.SerializeToString(), 1)


def record_of(payload: bytes) -> pb.Record:
    """The record that `payload_of` made into these bytes; raises ValueError if they are none."""
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(payload, _LONGEST)
        if not unpacking.eof or unpacking.unused_data:
            raise ValueError("it is not whole, or longer than any")
        return pb.Record.FromString(data)
    except (zlib.error, DecodeError, ValueError) as error:
        raise ValueError(f"a record that cannot be read: {error}") from None


def entries_of(payload: bytes) -> list[Entry]:
    """The entries of a record; raises ValueError if it cannot be read."""
    try:
        return [_entry(message) for message in record_of(payload).entries]
    except (KeyError, TypeError) as error:
        raise ValueError(f"a record that cannot be read: {error}") from None


def _entry(m: pb.Entry) -> Entry:
    kind = m.WhichOneof("kind")
    if kind is None:
        raise ValueError("an empty entry")
    value = getattr(m, kind)
    match kind:
        case "event":
            return Entry(m.now, codec.told_by(value))
    return Entry(None, _NOTES[kind](value))


_NOTES = {
    "adopted": lambda m: Adopted(
        InnerOrigin(m.origin.learner, m.origin.process, m.origin.number) if m.HasField("origin") else None,
        m.fresh,
    ),
    "gave": lambda m: Gave(m.number),
    "committed": lambda m: Committed(m.fragment, m.version, m.sha256, m.state),
    "signed": lambda m: Signed(m.fragment, m.signature),
    "end": lambda m: End(tuple(m.versions)),
}
