"""A process's work on each fragment: steps and tokens, without skipped steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from ddiloco.protocol.messages import NOTHING_MERGED, Watermark


@dataclasses.dataclass
class Total:
    """Steps and tokens of a process up to a step boundary.

    A step in flight counts until it turns out to have been skipped; then it is subtracted from the total
    after it and from all later ones, in place, so that references stay correct.
    """

    steps: int = 0
    tokens: int = 0

    def after(self, tokens: int) -> Total:
        """The total after one more step."""
        return Total(self.steps + 1, self.tokens + tokens)

    def without(self, tokens: int) -> None:
        """Subtracts a step with so many tokens."""
        self.steps, self.tokens = self.steps - 1, self.tokens - tokens

    def since(self, base: Total) -> tuple[int, int]:
        """Steps and tokens from `base` up to here."""
        return self.steps - base.steps, self.tokens - base.tokens


@dataclasses.dataclass
class HeldFragment:
    """The version of a fragment that a learner last applied, and the start of its work on it."""

    version: int
    merged_step: int  # global step at which `version` was merged
    base: Total
    lineage: int = 0  # which start of the syncer made `version`
    watermark: Watermark = NOTHING_MERGED  # how far the learner's work is in `version`
    offered: dict[int, Total] = dataclasses.field(default_factory=dict)
    """The total at each offer, by its `Watermark.steps`: the newest KEPT_OFFERS that count from `watermark`.
    An update with an older offer is treated as if it contained none."""
    begun_on: int = 0  # the version on which the oldest unmerged work was begun


@dataclasses.dataclass
class FragmentWork:
    """A learner's work on one fragment, as in its checkpoint."""

    version: int
    merged_step: int
    steps: int = 0
    tokens: int = 0
    lineage: int = 0
    watermark: Watermark = NOTHING_MERGED
    offered: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Steps and tokens in each offer, by its `Watermark.steps`."""
    begun_on: int = 0

    @classmethod
    def of(cls, held: HeldFragment, now: Total) -> FragmentWork:
        """The work on a fragment at this total."""
        offered = {step: made.since(held.base) for step, made in held.offered.items()}
        known = held.lineage, held.watermark, offered, held.begun_on
        return cls(held.version, held.merged_step, *(*now.since(held.base), *known))

    def held(self) -> HeldFragment:
        """The same for a process whose total starts at 0."""
        base = Total(-self.steps, -self.tokens)
        offered = {
            steps: Total(base.steps + counted, base.tokens + tokens)
            for steps, (counted, tokens) in self.offered.items()
        }
        known = self.lineage, self.watermark, offered, self.begun_on
        return HeldFragment(self.version, self.merged_step, base, *known)


def goes_on_after(began: Watermark, left: Mapping[int, int], mark: Watermark) -> bool:
    """Whether data that continue behind the work `began` include all of the work of a mark of another life.

    `left`: the steps at the end of each earlier life. Any of those, or an unknown one, may have continued in
    a second process of the same number; the data that it has read since would be read again.
    """
    if not mark.life:  # nothing was merged
        return True
    return mark.steps <= {**left, began.life: began.steps}.get(mark.life, -1)


@dataclasses.dataclass
class LearnerWork:
    """The core's part of a learner's checkpoint, from which a process starts a new life."""

    clock: int
    life: int
    steps: int  # as of a `Watermark`
    fragments: tuple[FragmentWork, ...]
    lives: dict[int, int] = dataclasses.field(default_factory=dict)
    """Earlier lives, with the steps at the end of each."""

    @property
    def reached(self) -> Watermark:
        """The step boundary of the checkpoint."""
        return Watermark(self.life, self.steps)

    def begins_after(self, merged: Iterable[Watermark]) -> Watermark | None:
        """The work behind which its data continue: that of `merged`, or the checkpoint's own if later.

        None if a process of another life did the merged work: the checkpoint may contain it too.

        Args:
          merged: the furthest work of the learner that is, or may still be, merged; by shard of the syncer.
        """
        later = [mark for mark in merged if not goes_on_after(self.reached, self.lives, mark)]
        if any(mark.life != self.life for mark in later):
            return None
        return max(later, default=self.reached)
