"""What learners and syncer tell each other about arrays; the arrays themselves travel beside these."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, order=True)
class RoundId:
    """One synchronisation: the fragment, and the global step at which it was due."""

    step: int
    fragment: int


@dataclasses.dataclass(frozen=True)
class FragmentCounters:
    """What a learner did to a fragment since it applied `version` (paper: c_steps, c_tokens)."""

    version: int
    steps: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Report:
    """A learner's metadata after an inner step: its clock t_m and its counters of the shard's fragments.

    `adopted` says whether it holds the welcome of its present incarnation; one that rejoined has none.
    `shards` are those of which it knows that it is a member.
    """

    learner: int
    incarnation: int
    step: int
    counters: tuple[FragmentCounters, ...]
    adopted: bool = False
    shards: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, order=True)
class Watermark:
    """How far a learner's work is in a version of a fragment: up to this step boundary, and no further.

    Later boundaries of a learner are larger: of a process that is started later the life is.

    Attributes:
      life: the incarnation under which the learner's process first held a state; 0: nothing is merged.
      steps: that had been started in that life and, where it went on from a checkpoint, in those before.
      position: where the learner's data stood then, opaque to the cores; empty: not told, or at the start.
    """

    life: int = 0
    steps: int = 0
    position: str = dataclasses.field(default="", compare=False, repr=False)

    @property
    def bare(self) -> Watermark:
        """The same without the position."""
        return Watermark(self.life, self.steps)


NOTHING_MERGED = Watermark()


@dataclasses.dataclass(frozen=True)
class Contribution:
    """A fragment as a learner held it after `step`, and the work since `version` that it stands for.

    `since` is the learner's watermark in `version`, as it was told; `upto` will be that in the next one.
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
