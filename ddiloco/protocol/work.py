"""What a learner's process has done to each fragment: its steps and tokens, without skipped steps."""

from __future__ import annotations

import dataclasses


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
    offered: dict[int, Total] = dataclasses.field(default_factory=dict)
    """By the step after which an offer was made: the total then. Only offers on `version`, and KEPT_OFFERS of
    them: an update that contains another is taken as if it contained none."""


@dataclasses.dataclass
class FragmentWork:
    """What a learner knows of one fragment, as its state on disk has it."""

    version: int
    merged_step: int
    steps: int = 0
    tokens: int = 0
    lineage: int = 0
    offered: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """By the step after which an offer was made: the steps and tokens in it."""

    @classmethod
    def of(cls, held: HeldFragment, now: Total) -> FragmentWork:
        """What there is of a fragment at this total."""
        offered = {step: made.since(held.base) for step, made in held.offered.items()}
        return cls(held.version, held.merged_step, *now.since(held.base), held.lineage, offered)

    def held(self) -> HeldFragment:
        """The same, without offers, for a process whose total begins at 0."""
        return HeldFragment(self.version, self.merged_step, Total(-self.steps, -self.tokens), self.lineage)
