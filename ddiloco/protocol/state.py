"""The durable state of a syncer: merged versions, watermarks and incarnations."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

from ddiloco.protocol.errors import LocalProtocolError
from ddiloco.protocol.estimates import OfferDelay
from ddiloco.protocol.messages import Contribution, RoundId, Watermark

Watermarks = Mapping[int, Watermark]
"""By learner with merged work: how far its work is in a version of a fragment."""

NO_WATERMARKS: Watermarks = {}
NO_DELAYS: Mapping[int, OfferDelay] = {}


def after_merge(before: Watermarks, given: Iterable[Contribution]) -> Watermarks:
    """The watermarks of a version that was made of these contributions."""
    return {**before, **{c.learner: c.upto for c in given}}


def newest_incarnations(*known: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The largest incarnation of each learner, over several shards."""
    newest: dict[int, int] = {}
    for learner, incarnation in itertools.chain(*known):
        newest[learner] = max(incarnation, newest.get(learner, 0))
    return tuple(sorted(newest.items()))


@dataclasses.dataclass(frozen=True)
class SyncerState:
    """The state that a syncer is restarted from after a crash; plain numbers, kept durable by its driver.

    Before a driver sends MergeFinished, `state.after(round)` is durable together with the fragment; before
    it carries out the actions of a LearnerJoined, the newest `SyncerCore.incarnation` of that learner is.
    Nothing else has to be durable.
    """

    versions: tuple[int, ...]  # by fragment
    merged_steps: tuple[int, ...]  # by fragment: the global step of the round that made the version
    incarnations: tuple[tuple[int, int], ...] = ()  # (learner, its newest incarnation)
    lineages: tuple[int, ...] = ()  # by fragment: which start of the syncer made the version; see docs
    watermarks: tuple[dict[int, Watermark], ...] = ()  # by fragment and learner
    delays: dict[int, OfferDelay] = dataclasses.field(default_factory=dict, compare=False)  # by learner

    def __post_init__(self) -> None:
        if not self.lineages:
            object.__setattr__(self, "lineages", (0,) * len(self.versions))
        if not self.watermarks:
            object.__setattr__(self, "watermarks", ({},) * len(self.versions))

    @classmethod
    def initial(cls, num_fragments: int) -> SyncerState:
        """The state of a run without merges or learners so far."""
        return cls((0,) * num_fragments, (0,) * num_fragments)

    @property
    def step(self) -> int:
        """The newest global step of which a round was merged."""
        return max(self.merged_steps)

    def after(
        self,
        merged: RoundId,
        lineage: int = 0,
        given: Iterable[Contribution] = (),
        delays: Mapping[int, OfferDelay] = NO_DELAYS,
    ) -> SyncerState:
        """The state after a merge of these offers, by a syncer with this lineage."""
        p = merged.fragment
        watermarks = after_merge(self.watermarks[p], given)
        return self.with_version(merged, self.versions[p] + 1, lineage, watermarks, delays)

    def furthest(self, learner: int) -> Watermark:
        """The furthest merged work of a learner."""
        return Watermark.furthest(known[learner] for known in self.watermarks if learner in known)

    def with_version(
        self,
        merged: RoundId,
        version: int,
        lineage: int,
        watermarks: Watermarks | None = None,
        delays: Mapping[int, OfferDelay] = NO_DELAYS,
    ) -> SyncerState:
        """The state with this version of a fragment, made in that round; `watermarks` None: as they are.

        Of the `delays` measured by then those of the newest round stay.
        """
        p = merged.fragment
        known = dict(self.watermarks[p] if watermarks is None else watermarks)
        return dataclasses.replace(
            self,
            versions=(*self.versions[:p], version, *self.versions[p + 1 :]),
            merged_steps=(*self.merged_steps[:p], merged.step, *self.merged_steps[p + 1 :]),
            lineages=(*self.lineages[:p], lineage, *self.lineages[p + 1 :]),
            watermarks=(*self.watermarks[:p], known, *self.watermarks[p + 1 :]),
            delays={**self.delays, **delays} if merged.step >= self.step else {**delays, **self.delays},
        )

    def with_incarnations(self, incarnations: tuple[tuple[int, int], ...]) -> SyncerState:
        """The state with these learners known."""
        return dataclasses.replace(self, incarnations=incarnations)

    def check(self, num_fragments: int) -> None:
        """Checks that the state is of a run with this number of fragments.

        Raises:
          LocalProtocolError: it is not.
        """
        counts = (len(self.versions), len(self.merged_steps), len(self.lineages))
        if set(counts) != {num_fragments}:
            raise LocalProtocolError(
                f"the state to start from has {counts[0]} versions, {counts[1]} merged steps and {counts[2]} "
                f"lineages, but must have {num_fragments} of each: one a fragment"
            )
        if min(self.versions) < 0 or min(self.merged_steps) < 0:
            raise LocalProtocolError("the state to start from has a version or a step below 0")
