"""What a learner's process has done to each fragment: its steps and tokens, without skipped steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from ddiloco.protocol.messages import NOTHING_MERGED, Watermark


@dataclasses.dataclass
class Total:
    """Steps and tokens of a process up to a step boundary.

    A step that is still under way counts until it turns out to have been skipped: then it is taken out of the
    total after it and of all later ones. Who refers to these objects is right without being told.
    """

    steps: int = 0
    tokens: int = 0

    def after(self, tokens: int) -> Total:
        """The total after one more step."""
        return Total(self.steps + 1, self.tokens + tokens)

    def without(self, tokens: int) -> None:
        """Takes out a step of so many tokens."""
        self.steps, self.tokens = self.steps - 1, self.tokens - tokens

    def since(self, base: Total) -> tuple[int, int]:
        """Steps and tokens from `base` up to here."""
        return self.steps - base.steps, self.tokens - base.tokens


@dataclasses.dataclass
class HeldFragment:
    """The version of a fragment that a learner last applied, and from where on its work on it counts."""

    version: int
    merged_step: int  # global step at which `version` was merged
    base: Total
    lineage: int = 0  # which start of the syncer made `version`
    watermark: Watermark = NOTHING_MERGED  # how far the learner's work is in `version`
    offered: dict[int, Total] = dataclasses.field(default_factory=dict)
    """By the steps (`Watermark.steps`) of an offer: the total then. Only offers of work that counts from
    `watermark`, and KEPT_OFFERS of them: an update that contains another is taken as if it contained none."""
    begun_on: int = 0  # the version on which the oldest work that is not merged was begun


@dataclasses.dataclass
class FragmentWork:
    """What a learner knows of one fragment, as its state on disk has it."""

    version: int
    merged_step: int
    steps: int = 0
    tokens: int = 0
    lineage: int = 0
    watermark: Watermark = NOTHING_MERGED
    offered: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """By the steps (`Watermark.steps`) of an offer: the steps and tokens in it."""
    begun_on: int = 0

    @classmethod
    def of(cls, held: HeldFragment, now: Total) -> FragmentWork:
        """What there is of a fragment at this total."""
        offered = {step: made.since(held.base) for step, made in held.offered.items()}
        known = held.lineage, held.watermark, offered, held.begun_on
        return cls(held.version, held.merged_step, *(*now.since(held.base), *known))

    def held(self) -> HeldFragment:
        """The same for a process whose total begins at 0."""
        base = Total(-self.steps, -self.tokens)
        offered = {
            steps: Total(base.steps + counted, base.tokens + tokens)
            for steps, (counted, tokens) in self.offered.items()
        }
        known = self.lineage, self.watermark, offered, self.begun_on
        return HeldFragment(self.version, self.merged_step, base, *known)


def goes_on_after(began: Watermark, left: Mapping[int, int], mark: Watermark) -> bool:
    """Whether data that go on after the work `began` are later than those of a mark of another life.

    `left`: after how many steps each life before was left. Any of them may have gone on, as may one that is
    not known: a second process of the same number. What it drew since is drawn again.
    """
    if not mark.life:  # nothing was merged
        return True
    return mark.steps <= {**left, began.life: began.steps}.get(mark.life, -1)


@dataclasses.dataclass
class LearnerWork:
    """What a learner's core needs to go on from a checkpoint of its state, in a life of its own."""

    clock: int
    life: int
    steps: int  # as of a `Watermark`
    fragments: tuple[FragmentWork, ...]
    lives: dict[int, int] = dataclasses.field(default_factory=dict)
    """The lives that went before, and after how many steps each was left."""

    @property
    def reached(self) -> Watermark:
        """The step boundary at which it was taken."""
        return Watermark(self.life, self.steps)

    def begins_after(self, merged: Iterable[Watermark]) -> Watermark | None:
        """After which work its data go on: that of `merged`, or where the state was taken if this is later.

        None if other processes than the one that it is of drew what is merged: it may be in the state too.

        Args:
          merged: the furthest of the learner's work that is merged, or may be; by shard of the syncer.
        """
        later = [mark for mark in merged if not goes_on_after(self.reached, self.lives, mark)]
        if any(mark.life != self.life for mark in later):
            return None
        return max(later, default=self.reached)
