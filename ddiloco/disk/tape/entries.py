"""The entries of a tape, in Python and as bytes: events of the cores, and notes on arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from google.protobuf.message import DecodeError

from ddiloco.disk.tape import tape_pb2 as pb
from ddiloco.protocol import events, news
from ddiloco.protocol.messages import FragmentCounters, Report
from ddiloco.protocol.parts import FromPart, PartConnected
from ddiloco.schema import codec


@dataclasses.dataclass(frozen=True, order=True)
class InnerOrigin:
    """Where an inner optimizer state comes from: a learner's process, which numbers those it gave from 1.

    Process 0: from the learner's part of the snapshot of that number, from which the run resumed.
    """

    learner: int
    process: int
    number: int

    @property
    def in_snapshot(self) -> bool:
        """Whether it comes from the snapshot from which the run resumed."""
        return not self.process

    def __str__(self) -> str:
        if self.in_snapshot:
            return f"the inner state of learner {self.learner} in snapshot {self.number}"
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
    """A fragment's new version, with the SHA-256 of its pieces."""

    fragment: int
    version: int
    sha256: bytes


@dataclasses.dataclass(frozen=True)
class End:
    """The process ended by itself; the syncer's notes the versions of its fragments."""

    versions: tuple[int, ...] = ()


Note = Adopted | Gave | Committed | End
CoreEvent = codec.Event | news.News | FromPart | PartConnected
"""What a core is told."""

Content = CoreEvent | Note


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of a tape. `now`: seconds, as given to the core; None for a note."""

    now: float | None
    content: Content


class _Reports:
    """The last report of each learner: writer and reader both predict the next one from it."""

    def __init__(self) -> None:
        self._last: dict[int, Report] = {}

    def encode(self, r: Report) -> pb.Report:
        """Only what does not follow from the learner's last report."""
        last = self._last.get(r.learner)
        self._last[r.learner] = r
        if last is None or len(last.counters) != len(r.counters):
            others = [x for p, c in enumerate(r.counters) for x in (p, c.version, c.steps, c.tokens)]
            return pb.Report(
                learner=r.learner, incarnation=r.incarnation, step=r.step, others=others,
                fragments=len(r.counters) + 1, adopted=r.adopted,
            )  # fmt: skip
        steps, tokens = _growth(last.counters, r.counters)
        others = [
            x
            for p, (old, new) in enumerate(zip(last.counters, r.counters, strict=True))
            if new != _grown(old, steps, tokens)
            for x in (p, new.version, new.steps, new.tokens)
        ]
        same = r.incarnation == last.incarnation
        return pb.Report(
            learner=r.learner, incarnation=0 if same else r.incarnation, step=r.step - last.step,
            steps=steps, tokens=tokens, others=others, adopted=r.adopted,
        )  # fmt: skip

    def decode(self, m: pb.Report) -> Report:
        """Raises ValueError or KeyError if the message does not fit the last report."""
        others = {p: FragmentCounters(*row) for p, *row in zip(*[iter(m.others)] * 4, strict=True)}
        if m.fragments:
            counters = tuple(others[p] for p in range(m.fragments - 1))
            report = Report(m.learner, m.incarnation, m.step, counters, m.adopted)
        else:
            last = self._last[m.learner]
            counters = tuple(
                others.get(p) or _grown(c, m.steps, m.tokens) for p, c in enumerate(last.counters)
            )
            incarnation = m.incarnation or last.incarnation
            report = Report(m.learner, incarnation, last.step + m.step, counters, m.adopted)
        self._last[m.learner] = report
        return report


def _growth(old: Iterable[FragmentCounters], new: Iterable[FragmentCounters]) -> tuple[int, int]:
    """How many steps and tokens were added; read from a fragment whose version is the same."""
    for before, after in zip(old, new, strict=True):
        if before.version == after.version:
            return after.steps - before.steps, after.tokens - before.tokens
    return 0, 0


def _grown(c: FragmentCounters, steps: int, tokens: int) -> FragmentCounters:
    return FragmentCounters(c.version, c.steps + steps, c.tokens + tokens)


class Encoder:
    """Entries as messages; each tape has its own encoder, since a report is encoded against the last one."""

    def __init__(self) -> None:
        self._reports = _Reports()

    def __call__(self, content: Content, now: float | None = None) -> pb.Entry:
        """The message. Raises ValueError if a number has more than 64 bits."""
        match content:
            case events.StepReported(report):
                kind = {"report": self._reports.encode(report)}
            case news.Heard(report, step_time):
                kind = {"report": self._reports.encode(report)}
                kind["report"].MergeFrom(pb.Report(heard=True, step_time=step_time))
            case FromPart(part, word):
                kind = {"of_part": pb.OfPart(part=part, word=codec.message_of(word))}
            case PartConnected(part):
                kind = {"of_part": pb.OfPart(part=part)}
            case Adopted() | Gave() | Committed() | End():
                kind = {type(content).__name__.lower(): dataclasses.asdict(content)}
            case _ if isinstance(content, news.News):
                kind = {"news": codec.message_of(content)}
            case _:
                kind = {"event": codec.message_of(content)}
        return pb.Entry(now=now or 0.0, **kind)


class Decoder:
    """Messages as entries; must decode them in the order in which they were encoded."""

    def __init__(self) -> None:
        self._reports = _Reports()

    def __call__(self, payload: bytes) -> list[Entry]:
        """The entries of a record; raises ValueError if it cannot be read."""
        try:
            return [self._entry(message) for message in pb.Record.FromString(payload).entries]
        except (DecodeError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"a record that cannot be read: {error}") from None

    def _entry(self, m: pb.Entry) -> Entry:
        kind = m.WhichOneof("kind")
        if kind is None:
            raise ValueError("an empty entry")
        value = getattr(m, kind)
        match kind:
            case "event":
                return Entry(m.now, codec.told_by(value))
            case "news":
                return Entry(m.now, codec.told_by(value))
            case "report":
                return Entry(m.now, self._reported(value))
            case "of_part" if value.HasField("word"):
                return Entry(m.now, FromPart(value.part, codec.told_by(value.word)))
            case "of_part":
                return Entry(m.now, PartConnected(value.part))
        return Entry(None, _NOTES[kind](value))

    def _reported(self, m: pb.Report) -> events.StepReported | news.Heard:
        report = self._reports.decode(m)
        if not m.heard:
            return events.StepReported(report)
        return news.Heard(report, m.step_time if m.HasField("step_time") else None)


_NOTES = {
    "adopted": lambda m: Adopted(
        InnerOrigin(m.origin.learner, m.origin.process, m.origin.number) if m.HasField("origin") else None,
        m.fresh,
    ),
    "gave": lambda m: Gave(m.number),
    "committed": lambda m: Committed(m.fragment, m.version, m.sha256),
    "end": lambda m: End(tuple(m.versions)),
}
