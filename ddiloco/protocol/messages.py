"""Metadata of the arrays that learners and syncer exchange; the arrays travel beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

_BLOCK = 32  # fragments that are compared at once


@dataclasses.dataclass(frozen=True, order=True)
class RoundId:
    """One synchronisation: the fragment, and the global step at which it was due."""

    step: int
    fragment: int


@dataclasses.dataclass(frozen=True, slots=True)
class FragmentCounters:
    """A learner's work on a fragment since it applied `version` (paper: c_steps, c_tokens)."""

    version: int
    steps: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Report:
    """A learner's metadata after an inner step: its clock t_m and its counters of the shard's fragments.

    A step changes all counters alike. So a report has them as of one fixed point of the learner's work, and
    the work since then; a `FragmentCounters` changes with its fragment's version alone, and successive
    reports of a learner share those that have not changed.

    Attributes:
      bases: by fragment the counters without the work below; negative if the version came later.
      adopted: whether it has loaded the welcome of its present incarnation; a rejoined learner has none.
      shards: its memberships.
      steps, tokens: to be added to all of `bases`.
    """

    learner: int
    incarnation: int
    step: int
    bases: tuple[FragmentCounters, ...]
    adopted: bool = False
    shards: tuple[int, ...] = ()
    steps: int = 0
    tokens: int = 0

    def counted(self, base: FragmentCounters) -> FragmentCounters:
        """The counters of the fragment with this base."""
        return FragmentCounters(base.version, base.steps + self.steps, base.tokens + self.tokens)

    @property
    def counters(self) -> tuple[FragmentCounters, ...]:
        """The counters, by fragment."""
        return tuple(map(self.counted, self.bases))

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each fragment."""
        return tuple(base.version for base in self.bases)

    def changed_since(self, earlier: Report | None) -> list[int]:
        """Where `bases` differ from an earlier report's; without one, everywhere."""
        new, old = self.bases, () if earlier is None else earlier.bases
        if len(new) != len(old):
            return [*range(len(new))]
        places: list[int] = []
        for first in range(0, len(new), _BLOCK):  # slices are compared by identity, without a walk in Python
            ours, theirs = new[first : first + _BLOCK], old[first : first + _BLOCK]
            if ours != theirs:
                pairs = enumerate(zip(ours, theirs, strict=True), first)
                places += [place for place, (own, other) in pairs if own is not other]
        return places

    def continues(self, earlier: Report) -> bool:
        """Whether the work since an earlier report is possible, and no more than the clock's advance."""
        steps = self.steps - earlier.steps
        return 0 <= steps <= self.step - earlier.step and self.tokens >= earlier.tokens


@dataclasses.dataclass(frozen=True, order=True)
class Watermark:
    """How far a learner's work is in a version of a fragment: up to this step boundary, and no further.

    Later boundaries of a learner compare larger, as a later process has a larger life.

    Attributes:
      life: the incarnation under which the learner's process first held a state; 0: nothing is merged.
      steps: that had been started by then, those included behind which its data continue: along a learner's
        data they compare, whichever process has taken them.
      position: of the learner's data then, opaque to the cores; empty: not sent, or the start.
    """

    life: int = 0
    steps: int = 0
    position: str = dataclasses.field(default="", compare=False, repr=False)

    @staticmethod
    def furthest(marks: Iterable[Watermark]) -> Watermark:
        """The one that is furthest along the learner's data, whichever life has read them; none: nothing."""
        return max(marks, key=lambda mark: (mark.steps, mark.life), default=NOTHING_MERGED)

    @property
    def bare(self) -> Watermark:
        """The same without the position."""
        return Watermark(self.life, self.steps)


NOTHING_MERGED = Watermark()


@dataclasses.dataclass(frozen=True)
class OfferReceipt:
    """What a learner signs of an offer, opaque to the cores; empty where nothing is signed.

    Attributes:
      sha256: of the encoded arrays.
      head: of the shard's log, in the newest statement that the learner has; empty: none yet.
      signature: of the learner, under these and the contribution.
    """

    sha256: bytes = b""
    head: bytes = b""
    signature: bytes = b""


NO_RECEIPT = OfferReceipt()


@dataclasses.dataclass(frozen=True)
class Contribution:
    """A learner's fragment after `step`, with the work on it since `version`.

    `since` is the learner's watermark in `version`; `upto` will be the one in the next version.
    """

    learner: int
    incarnation: int
    fragment: int
    version: int
    step: int
    steps: int
    tokens: int
    lineage: int = 0  # of `version`
    since: Watermark = NOTHING_MERGED
    upto: Watermark = NOTHING_MERGED

    @property
    def brief(self) -> list[int]:
        """Learner, incarnation, version, step, steps and tokens, as the record of a round has them."""
        return [self.learner, self.incarnation, self.version, self.step, self.steps, self.tokens]
