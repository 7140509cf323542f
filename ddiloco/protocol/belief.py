"""What learners say of how far they have come, and whether it can be."""

from __future__ import annotations

from collections.abc import Sequence

from ddiloco.protocol import events, news
from ddiloco.protocol.membership import Membership
from ddiloco.protocol.messages import Report
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.speed_limit import SpeedLimit
from ddiloco.protocol.state import SyncerState


class Belief:
    """Holds a learner's word against the versions that there are, and against how fast learners go.

    It is possible, impossible, or too early: more than can be believed before others have come as far.
    """

    def __init__(
        self, policy: SyncPolicy, total_steps: int | None, state: SyncerState, members: Membership
    ) -> None:
        self._policy, self._total_steps, self._members = policy, total_steps, members
        self.merged = state
        self._speed_limit = SpeedLimit(policy, state)
        self._work_from = [0] * len(state.versions) if policy.rebase else list(state.merged_steps)
        """By fragment, the step from which work on the newest version may count: with rebase that goes on
        from an offer on the version before. Not known of versions that were there at the start."""

    def committed(self, word: news.Committed) -> None:
        """A version that was made, which learners may hold and have work on."""
        which, version, lineage = word.round, word.version, word.lineage
        p, known = which.fragment, self.merged
        if (version, lineage) == (known.versions[p], known.lineages[p]):
            return
        # Where a part has lost versions, on an older disk, work may go on from newer ones.
        before = known.merged_steps[p] if version > known.versions[p] else 0
        self._work_from[p] = before if self._policy.rebase else which.step
        self.merged = known.with_version(which, version, lineage)

    def reached(self, step: int, now: float) -> float | None:
        """A learner has come to a step that was possible; how many medians its pace is, if unusually many."""
        return self._speed_limit.reached(step, self._members, now)

    def too_early(self, learner: int, step: int, versions: Sequence[int], now: float) -> bool:
        """Whether the learner says to be further, on these versions, than can be believed yet."""
        ahead = not self._speed_limit.allows(learner, step, self._members, self.merged.step, now)
        return ahead and self._exists(step, versions) and self._speed_limit.may_be_vouched(step, now)

    def is_possible(self, learner: int, step: int, versions: Sequence[int], now: float) -> bool:
        """Whether the learner can have reached this step by now, with these versions."""
        allowed = self._speed_limit.allows(learner, step, self._members, self.merged.step, now)
        return allowed and self._exists(step, versions)

    def can_report(self, report: Report, now: float) -> bool:
        """Whether a report's step, versions and work are possible."""
        counters = report.counters
        versions = [c.version for c in counters]
        if any(c.steps < 0 or c.tokens < 0 for c in counters):
            return False
        if not self.is_possible(report.learner, report.step, versions, now):
            return False
        # An interval more, since the clock may be behind the update with which the work begins.
        known = zip(counters, self.merged.versions, self._work_from, strict=True)
        since = (step if c.version == version else 0 for c, version, step in known)
        most = report.step + self._policy.interval
        return all(c.steps <= most - first for c, first in zip(counters, since, strict=True))

    def can_rejoin(self, event: events.LearnerJoined, now: float) -> bool:
        """Whether a learner joins with a step and versions that are possible, of this run's history."""
        step, versions = event.step, event.versions
        if step is None or versions is None or not self.is_possible(event.learner, step, versions, now):
            return False
        if len(event.lineages) not in (0, len(versions)):
            return False
        ours = zip(self.merged.versions, self.merged.lineages, strict=True)
        theirs = zip(versions, event.lineages or self.merged.lineages, strict=True)
        return all(a == b for a, b in zip(ours, theirs, strict=True) if a[0] == b[0])

    def _exists(self, step: int, versions: Sequence[int]) -> bool:
        past_the_end = self._total_steps is not None and step > self._total_steps
        if step < 0 or past_the_end or len(versions) != self._policy.num_fragments:
            return False
        return all(0 <= theirs <= ours for theirs, ours in zip(versions, self.merged.versions, strict=True))
