"""Consistent global snapshots: when each process records its state, and what was then in flight."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ddiloco.protocol.errors import LocalProtocolError


@dataclasses.dataclass(frozen=True)
class Mark:
    """Says that one end of a channel has recorded its state for snapshot `number` (Chandy and Lamport 1985).

    `learner` is at one end of the channel; the syncer is at the other.
    """

    number: int
    learner: int


class Epoch:
    """A learner's end: the number of the newest snapshot that it has recorded its state for.

    Messages from the syncer carry its epoch (Lai and Yang 1987): one with a larger epoch is handled only
    after the state is recorded. So the channel to a learner need not keep the order of messages.
    """

    def __init__(self) -> None:
        self.number = 0

    def sees(self, number: int) -> bool:
        """Whether to record the state now, before what carries this epoch is handled."""
        if number <= self.number:
            return False
        self.number = number
        return True


class SnapshotCore:
    """The syncer's side of snapshots, one at a time; starts no thread, reads no clock, touches no array.

    The syncer records its own state as it begins one, then sends the marks. The channel from a learner keeps
    the order of messages: what comes before the learner's mark was in flight, and is the channel's state. A
    learner that goes before its mark has come is left out. No training waits: a snapshot that has not ended
    after `timeout` seconds is given up.

    Attributes:
      epoch: number of the newest snapshot that was begun; 0 if none was.
      absent: those that went before their mark.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.epoch = 0
        self.absent: tuple[int, ...] = ()
        self._awaited: set[int] = set()
        self._deadline: float | None = None

    def begin(self, number: int, learners: Iterable[int], now: float) -> list[Mark]:
        """The marks to send, now that the syncer has recorded its state; `now` is in seconds.

        Raises:
          LocalProtocolError: one is under way, or the number is not above all earlier ones.
        """
        if self.under_way:
            raise LocalProtocolError(f"snapshot {number} was begun while {self.epoch} was under way")
        if number <= self.epoch:
            raise LocalProtocolError(f"snapshot {number} was begun after {self.epoch}")
        self.epoch = number
        self._awaited = set(learners)
        self._deadline = now + self.timeout
        self.absent = ()
        return [Mark(number, m) for m in sorted(self._awaited)]

    def awaits(self, learner: int) -> bool:
        """Whether the learner's mark has yet to come, so that what comes before it was in flight."""
        return learner in self._awaited

    def marked(self, mark: Mark) -> bool:
        """Takes the mark of a learner that has recorded its state; returns whether it was awaited."""
        if not self.awaits(mark.learner) or mark.number != self.epoch:
            return False
        self._awaited.discard(mark.learner)
        return True

    def gone(self, learner: int) -> None:
        """Leaves out a learner whose process has ended or cannot be reached."""
        if learner in self._awaited:
            self._awaited.discard(learner)
            self.absent = tuple(sorted({*self.absent, learner}))

    def end(self) -> None:
        """The snapshot is complete, or is given up; another may begin."""
        self._awaited.clear()
        self._deadline = None

    @property
    def under_way(self) -> bool:
        """Whether a snapshot was begun and has not been ended."""
        return self._deadline is not None

    @property
    def done(self) -> bool:
        """Whether every learner has recorded its state or gone."""
        return self.under_way and not self._awaited

    def expired(self, now: float) -> bool:
        """Whether the snapshot that is under way has taken too long."""
        return self._deadline is not None and now >= self._deadline

    def next_deadline(self) -> float | None:
        """When the snapshot is to be given up, in the seconds of `now`; None if none is under way."""
        return self._deadline
