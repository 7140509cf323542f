"""The schedule of fragments by global step (paper: P fragments, each synchronised every H steps)."""

from __future__ import annotations

import dataclasses
import functools


def fragments_of(shard: int, shards: int, num_fragments: int) -> tuple[int, ...]:
    """Fragment p belongs to shard p mod S of the syncer."""
    return tuple(range(shard, num_fragments, shards))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Fragment p is due at the steps t >= 1 with t mod H = floor(p * H / P), and once more at the last step.

    At step 0 nothing is due: all learners still hold the initial parameters. The last rounds merge the work
    since each fragment's round before.
    """

    num_fragments: int
    interval: int
    last: int | None = None  # the run's last step; None: it has no end

    def offset(self, fragment: int) -> int:
        """Steps after a multiple of H at which the fragment is due."""
        return fragment * self.interval // self.num_fragments

    def due(self, step: int) -> tuple[int, ...]:
        """The fragments due at a step; several where P > H, all at the last one."""
        if step == self.last and step >= 1:
            return tuple(range(self.num_fragments))
        return self._due_after.get(step % self.interval, ()) if step >= 1 else ()

    @functools.cached_property
    def _due_after(self) -> dict[int, tuple[int, ...]]:
        """The fragments by offset, computed once because the syncer asks at every event."""
        offsets = [self.offset(p) for p in range(self.num_fragments)]
        return {t: tuple(p for p, offset in enumerate(offsets) if offset == t) for t in set(offsets)}

    def last_due(self, fragment: int, step: int) -> int:
        """The newest step at or before `step` at which the fragment is due, but for the last; 0: none."""
        return max(0, step - (step - self.offset(fragment)) % self.interval)

    def next_due(self, fragment: int, step: int) -> int:
        """The first step after `step` at which the fragment is due; from the last one on, without an end."""
        following = step + self.interval - (step - self.offset(fragment)) % self.interval
        return following if self.last is None or step >= self.last else min(following, self.last)
