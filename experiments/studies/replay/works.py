"""The work that a process did on its arrays, item by item, with what each needs and makes."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ddiloco.protocol.messages import Contribution, RoundId, Watermark
from ddiloco.storage.tape.entries import InnerOrigin
from experiments.studies.replay.reading import Tape, begins

BEFORE = -1
"""The entry number of work that is done before the first entry of a tape."""


class VersionId(NamedTuple):
    """A version of a fragment."""

    fragment: int
    version: int

    def __str__(self) -> str:
        return f"version {self.version} of fragment {self.fragment}"


class OfferId(NamedTuple):
    """A learner's work on a fragment after so many steps of a life, counted from this watermark.

    After the same step a learner may offer twice, before and after an update with some of its work.
    """

    learner: int
    life: int
    fragment: int
    steps: int
    since: Watermark

    @classmethod
    def of(cls, c: Contribution) -> OfferId:
        """The offer that a contribution was."""
        return cls(c.learner, c.upto.life, c.fragment, c.upto.steps, c.since.bare)

    def __str__(self) -> str:
        return f"learner {self.learner}'s offer of fragment {self.fragment} after {self.steps} steps"


@dataclasses.dataclass(frozen=True)
class ProcessId:
    """A process of the syncer: all that it merged. A tuple would equal the `VersionId` of its numbers."""

    shard: int
    number: int

    def __str__(self) -> str:
        return f"the end of process {self.number} of the syncer"


Key = VersionId | OfferId | InnerOrigin | ProcessId


@dataclasses.dataclass(frozen=True)
class ReplayWork:
    """One thing done to arrays; `entry` is the number of the tape's entry that caused it."""

    entry: int

    @property
    def needs(self) -> tuple[Key, ...]:
        """What must have been made before."""
        match self:
            case Adopt(fragments=versions, inner=inner):
                return (*versions, *([] if inner is None else [inner]))
            case Apply(update=version, merged=offer):
                return (version, *([] if offer is None else [offer]))
            case Return(origin=origin):
                return (origin,)
            case Begin(before=processes):
                return processes
            case MergeWork(given=given):
                return tuple(offer for _, offer in given)
        return ()

    @property
    def makes(self) -> Key | None:
        """What it makes, if anything."""
        match self:
            case OfferWork(id=key) | Give(origin=key) | Ended(process=key):
                return key
            case MergeWork(round=round_id, version=version, empty=False):
                return VersionId(round_id.fragment, version)
        return None


@dataclasses.dataclass(frozen=True)
class Adopt(ReplayWork):
    """A learner loads all fragments and an inner state; `inner` None: a fresh one."""

    fragments: tuple[VersionId, ...]
    inner: InnerOrigin | None


@dataclasses.dataclass(frozen=True)
class SetPosition(ReplayWork):
    """A learner's data continue from a position, JSON values; None: from their start."""

    position: Any


@dataclasses.dataclass(frozen=True)
class Return(ReplayWork):
    """A learner loads a state of before, as a tape names it that is there or was before."""

    origin: InnerOrigin


@dataclasses.dataclass(frozen=True)
class Step(ReplayWork):
    """A learner takes a step; `clock` steps came before it, and `tokens` are in its batch."""

    clock: int
    tokens: int
    incarnation: int


@dataclasses.dataclass(frozen=True)
class OfferWork(ReplayWork):
    """A learner copies a fragment for the syncer."""

    id: OfferId


@dataclasses.dataclass(frozen=True)
class Apply(ReplayWork):
    """A learner applies an update, as the action says."""

    update: VersionId
    mixing: float
    merged: OfferId | None  # the learner's offer that is in the update, if this process made it
    steps: int | None  # after so many steps it was made, in whichever process; None: none is in it
    rebase: bool


@dataclasses.dataclass(frozen=True)
class Give(ReplayWork):
    """A learner gives a copy of its inner state, or keeps one of its whole state."""

    origin: InnerOrigin


@dataclasses.dataclass(frozen=True)
class Begin(ReplayWork):
    """A process of the syncer begins, once those have ended that had its fragments before."""

    before: tuple[ProcessId, ...]


@dataclasses.dataclass(frozen=True)
class Ended(ReplayWork):
    """A process of the syncer has ended."""

    process: ProcessId


@dataclasses.dataclass(frozen=True)
class MergeWork(ReplayWork):
    """The syncer makes a version, if any of the offers is merged; `sha256` is None if the tape has none.

    A process makes merges in the order of their `number`, and notes each as soon as that one is durable.
    """

    number: int
    round: RoundId
    version: int
    given: tuple[tuple[Contribution, OfferId], ...]
    sha256: bytes | None = None
    empty: bool = False  # all offers were left out, and no version was made
    interval: int | None = None  # steps beyond it add no weight


class Handled(NamedTuple):
    """An entry of a tape, with what the core decided on it; `decided` is empty for a note."""

    now: float | None
    content: Any
    decided: Sequence[Any]


class Recorded(NamedTuple):
    """A record that the actor of a syncer made."""

    now: float
    name: str
    values: Mapping[str, Any]


@dataclasses.dataclass
class Actor:
    """A process of a learner or of the syncer.

    Attributes:
      sent: a learner's offers that it sent, as it sent each last.
    """

    tape: Tape
    works: list[ReplayWork]
    handled: list[Handled]
    records: list[Recorded] = dataclasses.field(default_factory=list)
    sent: dict[OfferId, Contribution] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Whose process it is."""
        return self.tape.header.actor


@dataclasses.dataclass
class ReplayPlan:
    """What every actor did."""

    learners: list[Actor]
    syncers: list[Actor]  # in order
    began: Mapping[InnerOrigin, pathlib.Path] = dataclasses.field(default_factory=dict)
    """The folders of states that the run resumed from, which earlier tapes name."""

    @property
    def actors(self) -> list[Actor]:
        """All of them, the syncer's last."""
        return [*self.learners, *self.syncers]

    @property
    def first(self) -> Tape:
        """The tape of the syncer with which the run begins."""
        return self.syncers[0].tape

    @property
    def merges(self) -> list[list[MergeWork]]:
        """Of each process of the syncer, in the order in which it began them."""
        return [[work for work in actor.works if isinstance(work, MergeWork)] for actor in self.syncers]

    @property
    def given(self) -> set[Key]:
        """What exists from the start: the first versions, and the states that the run resumed from."""
        return {VersionId(p, version) for p, version in self.begins.items()} | {*self.began}

    @property
    def begins(self) -> dict[int, int]:
        """By fragment, the version with which the run begins."""
        return begins([actor.tape for actor in self.syncers])
