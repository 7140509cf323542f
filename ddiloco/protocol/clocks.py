"""Vector clocks: how much work of each learner a state holds, and which of two states came first."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class VectorClock:
    """What a state follows from; a learner or fragment that is missing has no part in it.

    One state comes before another if the other holds all that it does, and more (`<=`, but not both ways).
    """

    # By learner (incarnation, global step), which only grows: a learner that is welcomed again, perhaps at an
    # earlier step, has a larger incarnation
    learners: Mapping[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    # By fragment, the version; 0, where all begin, is left out
    versions: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def joined(self, other: VectorClock) -> VectorClock:
        """The clock of a state that holds both: by entry, the later one."""
        return VectorClock(
            {m: max(self._at(m), other._at(m)) for m in {*self.learners, *other.learners}},
            {p: max(self.version(p), other.version(p)) for p in {*self.versions, *other.versions}},
        )

    def stepped(self, learner: int, incarnation: int, step: int) -> VectorClock:
        """The clock with the learner at this step."""
        return dataclasses.replace(self, learners={**self.learners, learner: (incarnation, step)})

    def merged(self, fragment: int, version: int) -> VectorClock:
        """The clock with this version of the fragment."""
        return dataclasses.replace(self, versions={**self.versions, fragment: version})

    def version(self, fragment: int) -> int:
        """The version of the fragment."""
        return self.versions.get(fragment, 0)

    def __le__(self, other: VectorClock) -> bool:
        """Whether the other holds all that this one does."""
        return all(at <= other._at(m) for m, at in self.learners.items()) and all(
            version <= other.version(p) for p, version in self.versions.items()
        )

    def _at(self, learner: int) -> tuple[int, int]:
        return self.learners.get(learner, (-1, -1))


def is_consistent_cut(syncer: VectorClock, learners: Mapping[int, VectorClock]) -> bool:
    """Whether these could be the states of one moment: none holds work that its owner has yet to do.

    Args:
      syncer: of the global model, to which the versions belong.
      learners: by number, of each learner's own state.
    """
    states = [syncer, *learners.values()]
    return all(
        all(state.version(p) <= syncer.version(p) for p in state.versions)
        and all(state._at(m) <= own._at(m) for m, own in learners.items())
        for state in states
    )
