"""Which hosts of a learner train together: all of them or, after a loss, those that are left.

A host waits until it is in a group, and is then in it until its connection ends. A group trains as one JAX
job, whose processes end together; then its hosts wait again. So a learner shrinks as one that restarts, and
grows as one that is preempted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

RESTART_SECONDS = 300.0
"""That a group which was asked to leave has to come back; else hosts whose start takes longer than they wait
for each other would grow and shrink by turns."""


@dataclasses.dataclass(frozen=True)
class Form:
    """These hosts, in this order, are to train together."""

    hosts: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Dissolve:
    """The group is to leave with a checkpoint, since it would be larger as it comes back."""

    hosts: tuple[int, ...]


class Rendezvous:
    """The hosts of one learner; a clock's time comes with each event, in seconds.

    Sizes of a group are those multiples of `min_hosts` that divide `count`: then the rows of a step divide
    among the hosts whenever they do among all.

    Example:
      >>> two = Rendezvous(count=2, min_hosts=1, timeout=30.0)
      >>> two.join(0, 5.0)
      >>> two.decide(34.0), two.decide(35.0)
      (None, Form(hosts=(0,)))
      >>> two.join(1, 50.0)
      >>> two.decide(50.0)
      Dissolve(hosts=(0,))
    """

    def __init__(self, count: int, min_hosts: int, timeout: float) -> None:
        """`count`: hosts that the learner has when none is lost.

        `timeout`: seconds that those that are there wait for the others.

        Raises:
          ValueError: `min_hosts` does not divide `count`.
        """
        if not 0 < min_hosts <= count or count % min_hosts:
            raise ValueError(f"min_hosts is {min_hosts}, but must divide {count}")
        self.count, self.min_hosts, self.timeout = count, min_hosts, timeout
        self.group: tuple[int, ...] = ()  # that trains; (): none
        self.dissolving = False  # whether the group was asked to leave
        self._waiting: dict[int, float] = {}  # since when
        self._training: set[int] = set()  # hosts of the group that are connected
        self._free_since = 0.0  # when the last group ended
        self._expected: set[int] = set()  # hosts that are to come back, as they were asked to

    @property
    def empty(self) -> bool:
        """Whether no host is there."""
        return not (self._waiting or self._training)

    def join(self, host: int, now: float, group: Sequence[int] = ()) -> None:
        """A host has connected; `group`: that in which it trains already, (): it waits for one.

        Raises:
          ValueError: another group trains by now.
        """
        if not group:
            self._training.discard(host)  # another process of this host, as the group will notice
            self._waiting[host] = now
            self._end_if_gone(now)
            return
        if self.group not in ((), tuple(group)):
            raise ValueError(f"hosts {self.group} train, not {tuple(group)}")
        self.group = tuple(group)
        self._training.add(host)

    def leave(self, host: int, now: float) -> None:
        """A host's connection has ended."""
        self._waiting.pop(host, None)
        self._training.discard(host)
        self._end_if_gone(now)

    def decide(self, now: float) -> Form | Dissolve | None:
        """What is to happen; to be asked after each event, and `timeout` seconds later."""
        if not self._waiting:
            return None
        first = min(self._waiting.values())
        if back := [since for host, since in self._waiting.items() if host in self.group]:
            if now < min(back) + self.timeout:
                return None  # the others end, too
            self.group, self._training, self.dissolving = (), set(), False  # what is left of it hangs
        if self.group:
            there = len(self._waiting) + len(self.group)
            if self.dissolving or self._size(there) <= len(self.group):
                return None
            if there < self.count and now < first + self.timeout:
                return None
            self.dissolving, self._expected = True, {*self.group}
            return Dissolve(self.group)
        there, wait = len(self._waiting), self.timeout
        if not self._expected <= self._waiting.keys():
            wait = max(wait, RESTART_SECONDS)
        if there < self.count and now < max(first, self._free_since) + wait:
            return None
        self._expected = set()
        self.group = tuple(sorted(self._waiting)[: self._size(there)])
        self._training = set(self.group)
        for host in self.group:
            del self._waiting[host]
        return Form(self.group) if self.group else None

    def _size(self, there: int) -> int:
        """Hosts in a group, of so many; 0: too few."""
        sizes = range(self.min_hosts, there + 1, self.min_hosts)
        return max((size for size in sizes if self.count % size == 0), default=0)

    def _end_if_gone(self, now: float) -> None:
        if self.group and not self._training:
            self.group, self.dissolving, self._free_since = (), False, now
