"""What the two halves of a syncer tell each other: the authority over learners, and those who merge.

In one process they are method calls; between processes they are messages, in order over each channel.
"""

from __future__ import annotations

import dataclasses

from ddiloco.protocol.messages import Report, RoundId


@dataclasses.dataclass(frozen=True)
class RollCall:
    """A new connection: what was told before is void, who is there follows, and the part says all again."""


@dataclasses.dataclass(frozen=True)
class Admitted:
    """A learner is to be welcomed: every part sends it its fragments."""

    learner: int
    incarnation: int


@dataclasses.dataclass(frozen=True)
class Begun:
    """A learner counts from now on, in the place of its older incarnation; it holds these versions."""

    learner: int
    incarnation: int
    step: int
    versions: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Heard:
    """A learner's report was found possible; `step_time` is its measured seconds a step, if known."""

    report: Report
    step_time: float | None


@dataclasses.dataclass(frozen=True)
class Left:
    """A learner no longer counts: it has gone for good, or has fallen silent."""

    learner: int
    incarnation: int
    gone: bool


@dataclasses.dataclass(frozen=True)
class Returned:
    """A learner that had fallen silent counts again, with what it had."""

    learner: int
    incarnation: int


@dataclasses.dataclass(frozen=True)
class AllPresent:
    """Nobody is waited for whom the run starts with, or who was there before a restart, or with the last."""


@dataclasses.dataclass(frozen=True)
class Noted:
    """The authority knows of a merge: its update may be broadcast."""

    round: RoundId


News = RollCall | Admitted | Begun | Heard | Left | Returned | AllPresent | Noted
"""What the authority tells those who merge."""


@dataclasses.dataclass(frozen=True)
class Committed:
    """A round is merged and durable; it is broadcast after Noted, so the authority knows all versions."""

    round: RoundId
    version: int
    lineage: int


@dataclasses.dataclass(frozen=True)
class Stuck:
    """Whether none of a part's rounds can gain from the learners that are done, while others are not."""

    stuck: bool


@dataclasses.dataclass(frozen=True)
class Over:
    """Every round of a part is merged, skipped or abandoned."""


@dataclasses.dataclass(frozen=True)
class Doubted:
    """A learner has a version that bears the right number, but is of a history that was lost."""

    learner: int
    incarnation: int


Word = Committed | Stuck | Over | Doubted
"""What those who merge tell the authority."""
