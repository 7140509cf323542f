"""Consistent global snapshots: when each process records its state, and what was then in flight."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ddiloco.protocol.errors import LocalProtocolError


@dataclasses.dataclass(frozen=True)
class Mark:
    """Tells one end of a channel that the other has recorded its state (Chandy and Lamport 1985).

    Attributes:
      number: of the snapshot.
      learner: at one end of the channel; the syncer is at the other.
      sent: messages that the sender had ever sent on the channel before; None: it does not count them, since
        the channel keeps their order, or since what comes after the mark may be missed.
    """

    number: int
    learner: int
    sent: int | None = None


class Epoch:
    """One end of a channel: which messages were sent before the cut, and which of them were in flight.

    Every message carries its sender's epoch, the number of the newest snapshot that the sender has recorded
    its state for (Lai and Yang 1987), so channels need not keep the order of messages. What comes with a
    larger epoch than one's own is handled only after one has recorded one's own state.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self._sent = 0
        self._sent_before = 0  # this end recorded its state
        self._heard = 0
        self._heard_before = 0  # of these, those sent before the other end recorded its state
        self._expected: int | None = None  # how many of them there are

    def sees(self, number: int) -> bool:
        """Whether this end is to record its state now, before it handles what carries this epoch."""
        if number <= self.number:
            return False
        self.number = number
        self._sent_before, self._heard_before, self._expected = self._sent, self._heard, None
        return True

    def stamp(self) -> int:
        """The epoch of a message that is sent now."""
        self._sent += 1
        return self.number

    def told(self, epoch: int) -> bool:
        """Takes note of a message, after `sees`; whether it was in flight as the cut was made."""
        self._heard += 1
        if epoch >= self.number:
            return False
        self._heard_before += 1
        return True

    def mark(self, learner: int, *, counted: bool = True) -> Mark:
        """The mark to send once the state is recorded."""
        return Mark(self.number, learner, self._sent_before if counted else None)

    def marked(self, mark: Mark) -> bool:
        """Takes the other end's mark, after `sees`; whether it is of the newest snapshot."""
        if mark.number != self.number:
            return False
        self._expected = 0 if mark.sent is None else mark.sent
        return True

    @property
    def complete(self) -> bool:
        """Whether all that was in flight on the way to this end is here."""
        return self._expected is not None and self._heard_before >= self._expected


class SnapshotCore:
    """The syncer's side of snapshots, one at a time; starts no thread, reads no clock, touches no array.

    The syncer records its own state as it begins one, then sends the marks. What `told` calls in flight is
    the state of the channel from that learner. A learner that goes before its mark has come is left out.
    Nobody waits: one that has not come to its `end` within `timeout` seconds is given up by that.

    Attributes:
      epoch: number of the newest snapshot that was begun; 0 if none was.
      recorded: the learners whose mark has come and whose channel is complete, by number.
      absent: those that went before.
    """

    def __init__(self, timeout: float, epoch: int = 0) -> None:
        """`epoch`: the number of the newest snapshot of an earlier process of this run."""
        self.timeout = timeout
        self.epoch = epoch
        self.recorded: tuple[int, ...] = ()
        self.absent: tuple[int, ...] = ()
        self._channels: dict[int, Epoch] = {}
        self._awaited: set[int] = set()
        self._deadline: float | None = None

    def begin(self, number: int, learners: Iterable[int], now: float, *, counted: bool = False) -> list[Mark]:
        """The marks to send, now that the syncer has recorded its state; `now` is in seconds.

        `counted`: whether both ends put every message through `stamp` and `told`.

        Raises:
          LocalProtocolError: one is under way, or the number is not above all before it.
        """
        if self.under_way:
            raise LocalProtocolError(f"snapshot {number} was begun while {self.epoch} was under way")
        if number <= self.epoch:
            raise LocalProtocolError(f"snapshot {number} was begun after {self.epoch}")
        self.epoch = number
        self._awaited = set(learners)
        self._deadline = now + self.timeout
        self.recorded = self.absent = ()
        for learner in {*self._channels, *self._awaited}:
            self._channel(learner).sees(number)
        return [self._channel(m).mark(m, counted=counted) for m in sorted(self._awaited)]

    def stamp(self, learner: int) -> int:
        """The epoch of a message that is sent to the learner now."""
        return self._channel(learner).stamp()

    def told(self, learner: int, epoch: int | None = None) -> bool:
        """Takes note of a learner's message; whether it belongs to the state of the channel from it.

        `epoch`: the sender's; None: the channel keeps the order, so all before the mark was sent before it.
        """
        awaited = self.under_way and learner in self._awaited
        if epoch is None:
            return awaited
        early = self._channel(learner).told(epoch)
        self._settle(learner)
        return early and awaited

    def marked(self, mark: Mark) -> bool:
        """Takes a learner's mark, which says that it has recorded its state; whether one was awaited."""
        if not self.under_way or mark.learner not in self._awaited:
            return False
        if not self._channel(mark.learner).marked(mark):
            return False
        self._settle(mark.learner)
        return True

    def gone(self, learner: int) -> None:
        """The learner's process is no more, or can no longer be reached: its channel is void."""
        if learner in self._awaited:
            self._awaited.discard(learner)
            self.absent = tuple(sorted({*self.absent, learner}))
        self._channels.pop(learner, None)

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
        """Whether every learner has recorded its state or gone, and every channel is complete."""
        return self.under_way and not self._awaited

    def expired(self, now: float) -> bool:
        """Whether the snapshot that is under way has taken too long."""
        return self.under_way and now >= self._deadline

    def next_deadline(self) -> float | None:
        """When the snapshot is to be given up, in the seconds of `now`; None if none is under way."""
        return self._deadline

    def _channel(self, learner: int) -> Epoch:
        return self._channels.setdefault(learner, Epoch(self.epoch))

    def _settle(self, learner: int) -> None:
        if learner in self._awaited and self._channels[learner].complete:
            self._awaited.discard(learner)
            self.recorded = tuple(sorted({*self.recorded, learner}))
