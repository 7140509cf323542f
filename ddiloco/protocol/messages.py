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
    """A learner's metadata after an inner step: its clock t_m and, by fragment, its counters.

    `adopted` says whether it holds the welcome of its present incarnation; one that rejoined has none.
    """

    learner: int
    incarnation: int
    step: int
    counters: tuple[FragmentCounters, ...]
    adopted: bool = False


@dataclasses.dataclass(frozen=True)
class Contribution:
    """A fragment as a learner held it after `step`, and the work since `version` that it stands for."""

    learner: int
    incarnation: int
    fragment: int
    version: int
    step: int
    steps: int
    tokens: int
    lineage: int = 0  # of `version`

    @property
    def brief(self) -> list[int]:
        """Learner, incarnation, version, step, steps and tokens, as the record of a round has them."""
        return [self.learner, self.incarnation, self.version, self.step, self.steps, self.tokens]


@dataclasses.dataclass(frozen=True)
class Given:
    """A learner whose offer is in an update, and the step after which it had made that offer."""

    learner: int
    step: int
