"""What processes tell each other about a snapshot."""

from __future__ import annotations

import concurrent.futures
import dataclasses

from ddiloco.storage.snapshots.parts import SYNCER_PART, PartFiles, fragments_part, learner_part

SYNCER = -1  # its number among those whose parts are awaited; those below are its parts'


@dataclasses.dataclass(frozen=True)
class StateRecorded:
    """The learner's mark: it has recorded its state, and its later messages are after the cut."""

    learner: int  # its number
    incarnation: int  # the one that was asked
    number: int  # of the snapshot
    step: int | None  # of the recorded state; None: there was none, or it has nowhere to write
    versions: tuple[int, ...] = ()  # by fragment, of that state


@dataclasses.dataclass(frozen=True)
class PartWritten:
    """The result of writing a learner's part: its files, or why there are none."""

    learner: int
    number: int
    files: PartFiles | None
    problem: str = ""

    @classmethod
    def of(cls, learner: int, number: int, done: concurrent.futures.Future[PartFiles]) -> PartWritten:
        """From the future that `PartWriter.write` gave, once it is done."""
        if done.cancelled():
            return cls(learner, number, None, "its process is at its end")
        if done.exception() is not None:
            return cls(learner, number, None, str(done.exception()))
        return cls(learner, number, done.result())


@dataclasses.dataclass(frozen=True)
class Completed:
    """The result of making a snapshot complete; `problem` is empty if it is, else whose part has it."""

    number: int
    problem: str
    learner: int = SYNCER


SnapshotMessage = StateRecorded | PartWritten
"""A learner's messages to the syncer."""


@dataclasses.dataclass(frozen=True)
class CutBegun:
    """The authority of a syncer has recorded its state for snapshot `number`, in which these learners are."""

    number: int
    learners: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class CutOver:
    """Snapshot `number` is over, and all before it; a part may have missed that they had begun."""

    number: int


@dataclasses.dataclass(frozen=True)
class FragmentsWritten:
    """The result of writing the fragments of a part of the syncer: the files, or why there are none."""

    part: int
    number: int
    files: PartFiles | None
    versions: tuple[tuple[int, int], ...]
    problem: str = ""


def sender_of(event: object) -> tuple[int | None, int]:
    """Learner and incarnation that an event comes from; None: it is the syncer's own."""
    said = getattr(event, "report", None) or getattr(event, "contribution", event)
    return getattr(said, "learner", None), getattr(said, "incarnation", 0)


def part_name(learner: int) -> str:
    """The name of a learner's part of a snapshot, or of one of the syncer's."""
    if learner < SYNCER:
        return fragments_part(SYNCER - 1 - learner)
    return SYNCER_PART if learner == SYNCER else learner_part(learner)
