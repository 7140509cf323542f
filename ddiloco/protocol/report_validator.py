"""Validation of learners' clocks, versions and work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from ddiloco.protocol import events
from ddiloco.protocol.membership import Member, Membership
from ddiloco.protocol.messages import Report, RoundId
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import SyncerState

T = TypeVar("T")

MAX_SPEED = 16.0
"""Maximum speed of the furthest learner, in median speeds, beyond an interval's lead."""

UNUSUAL_SPEED = 4.0
"""Speed above which there is an alarm: with K=1 the fastest clock sets rounds and the end."""

SHORTEST_STEP = 1e-4
"""Assumed median step time in seconds before any is measured."""

PAUSE = 2.0
"""Median steps without any message that count as a pause of the syncer or its network."""

MAX_AHEAD = 4.0
"""Maximum progress of a learner, relative to half of the learners, while no step time is known."""

MAX_LEAP = 100_000
"""Maximum steps of learners while the syncer was down: a day at one step a second, and more."""


class ReportValidator:
    """Checks whether a learner's clock, versions and work are possible.

    An impossibly large clock would skip all rounds up to it, for all learners. So a clock may be an interval
    beyond where the furthest learner can be by now, at 16 times the median learner's speed. Before most step
    times are measured (at the start, and after a restart, during which learners kept stepping) the bound is
    four times the progress that half of the learners claim. A clock beyond that is accepted once others are
    as far.

    "Half of the learners" counts the initial ones, before they join, and all with a message within the
    silence timeout. Messages of a pause arrive all at once after it: for the length of the pause the speed of
    before it applies.
    """

    def __init__(
        self,
        policy: SyncPolicy,
        total_steps: int | None,
        state: SyncerState,
        members: Membership,
        fragments: Sequence[int],
    ) -> None:
        """`state`: the syncer's initial state; if that is not the start of the run, it was down.

        `fragments`: of which learners report versions and work.
        """
        self._fragments = fragments
        self._policy, self._total_steps, self._members = policy, total_steps, members
        self._interval = policy.interval  # the longest so far: clocks may lag by half of an earlier one
        self.merged = state
        self._work_from = list(state.merged_steps)
        """By fragment, the step from which work on the newest version may count; with rebase, each learner's
        own last merged offer."""
        self._was_away = bool(state.step or state.incarnations)
        self._began: float | None = None
        self._step, self._at = float(state.step), 0.0  # a certain clock of the furthest learner, and its time
        self._median: float | None = None  # step time in seconds, as last known
        self._before: tuple[float, float, float | None] = self._step, 0.0, None  # these, before a pause
        self._heard = self._paused_until = 0.0  # time of the last message; until when the pause counts
        self._known = self._left = state.step  # the furthest valid clock; the syncer's own step
        known = [m for m, _ in state.incarnations] if self._was_away else range(policy.num_learners)
        self._claims = dict.fromkeys(known, state.step)  # claimed clocks, by learner
        self._since = state.step, 0.0  # where measuring the furthest learner's speed began

    def set_policy(self, policy: SyncPolicy) -> None:
        """Follows another policy."""
        self._policy, self._interval = policy, max(self._interval, policy.interval)

    def committed(self, which: RoundId, version: int, lineage: int) -> None:
        """Records a new version, which learners may hold and have work on."""
        p, known = which.fragment, self.merged
        self._work_from[p] = which.step
        self.merged = known.with_version(which, version, lineage)

    def reached(self, step: int, now: float) -> float | None:
        """Records a valid clock; returns its speed in medians if that is unusual."""
        if step <= self._known:
            return None
        self._step = float(step) if self._returning(now) else min(float(step), self._certain(now))
        self._known, self._at = step, now
        gone = step - self._since[0]
        if gone < UNUSUAL_SPEED * self._interval and not self._returning(now):
            return None
        seconds, self._since = now - self._since[1], (step, now)
        speed = gone * (self._members.median_step() or 0.0) / seconds if seconds > 0 else 0.0
        return None if self._returning(now) or speed <= UNUSUAL_SPEED else speed

    def too_early(self, event: events.LearnerJoined | Report, now: float) -> bool:
        """Whether the learner's clock, on its versions, may be true but cannot be confirmed yet."""
        step = event.step
        return step is not None and not self.allows(event.learner, step, now) and self.may_be(event, now)

    def may_be(self, event: events.LearnerJoined | Report, now: float) -> bool:
        """Whether a clock that is not allowed yet may be in time."""
        step = event.step or 0
        if self._step_time(now) is not None or step > self._most(now) + self._interval:
            return False
        return self._exists(step, event.versions or ())

    def is_possible(self, learner: int, step: int, versions: Sequence[int], now: float) -> bool:
        """Whether the learner can have reached this step by now, with these versions."""
        return self.allows(learner, step, now) and self._exists(step, versions)

    def can_report(self, report: Report) -> bool:
        """Whether the versions and the work of a report are possible at its step."""
        m = self._members.newest(report.learner)
        if len(report.bases) != len(self._fragments) or not self._is_a_clock(report.step):
            return False
        where: Iterable[int] = range(len(self._fragments))
        if m is not None and m.report is not None and report.continues(m.report):
            where = m.changed(report)  # the rest was possible in its last report, and is still
        # An interval more, since the clock may lag behind the update at the start of the work.
        most, newest = report.step + self._interval, self.merged.versions
        for i in where:
            p, base = self._fragments[i], report.bases[i]
            steps, version = base.steps + report.steps, base.version
            if steps < 0 or base.tokens + report.tokens < 0 or not 0 <= version <= newest[p]:
                return False
            if steps > most - self._counted_from(m, p, version):
                return False
        return True

    def _counted_from(self, m: Member | None, p: int, version: int) -> int:
        """The earliest clock from which a learner's work on a fragment may count."""
        if version != self.merged.versions[p]:
            return 0
        if not self._policy.rebase:
            return self._work_from[p]
        return 0 if m is None else m.counted_from.get(p, 0)

    def can_rejoin(self, event: events.LearnerJoined, now: float) -> bool:
        """Whether a learner rejoins with a possible step and versions, of this run's history."""
        step, versions = event.step, event.versions
        if step is None or versions is None or not self.is_possible(event.learner, step, versions, now):
            return False
        if len(event.lineages) not in (0, len(versions)):
            return False
        merged, lineages = self.merged, dict(self._own(event.lineages)) if event.lineages else {}
        newest = [p for p, version in self._own(versions) if version == merged.versions[p]]
        return all(lineages.get(p, merged.lineages[p]) == merged.lineages[p] for p in newest)

    def _own(self, rows: Sequence[T]) -> Iterable[tuple[int, T]]:
        """Pairs each row with its fragment."""
        return zip(self._fragments, rows, strict=True)

    def _is_a_clock(self, step: int) -> bool:
        past_the_end = self._total_steps is not None and step > self._total_steps
        return step >= 0 and not past_the_end

    def _exists(self, step: int, versions: Sequence[int]) -> bool:
        if not self._is_a_clock(step) or len(versions) != len(self._fragments):
            return False
        return all(0 <= version <= self.merged.versions[p] for p, version in self._own(versions))

    def allows(self, learner: int, step: int, now: float) -> bool:
        """Whether the learner's clock can be this large by now."""
        if self._began is None:
            self._began = self._at = self._heard = now
        self._listen(now)
        self._known = max(self._known, self.merged.step)
        self._claims[learner] = max(step, self._claims.get(learner, 0))
        if step <= self._known:
            return True
        furthest = self._vouched(learner, now) if self._step_time(now) is None else self._certain(now)
        return step <= furthest + self._interval

    def _step_time(self, now: float) -> float | None:
        """Median step time for the bound on clocks; None: unknown."""
        return self._median if now >= self._paused_until else self._before[2]

    def _certain(self, now: float) -> float:
        """The furthest possible clock, by elapsed time."""
        step, at = (self._step, self._at) if now >= self._paused_until else self._before[:2]
        return step + (now - at) * MAX_SPEED / (self._step_time(now) or SHORTEST_STEP)

    def _vouched(self, learner: int, now: float) -> float:
        """The bound on the learner's clock by the lower half of all claims."""
        said = sorted((self._claims[m] for m in {learner, *self._witnesses(now)}), reverse=True)
        gone = said[(len(said) - 1) // 2] - self._left
        return min(self._most(now), self._left + MAX_AHEAD * max(0, gone))

    def _most(self, now: float) -> float:
        """The bound on any clock while no step time is known."""
        return self._left + MAX_LEAP if self._returning(now) else self._certain(now)

    def _witnesses(self, now: float) -> list[int]:
        """Learners with a message within the silence timeout; unjoined ones count from the first event."""
        since, first = now - self._policy.silence_timeout, self._began or 0.0
        known = ((m, self._members.newest(m)) for m in self._claims)
        return [m for m, newest in known if max(first, newest.heard_at if newest else first) > since]

    def _returning(self, now: float) -> bool:
        """Whether learners may still rejoin that kept stepping while the syncer was down."""
        began = now if self._began is None else self._began
        return self._was_away and now < began + self._policy.silence_timeout

    def _listen(self, now: float) -> None:
        """Detects the end of a pause; keeps the median of before it, as learners are silent by now."""
        gap, self._heard = now - self._heard, now
        if gap > PAUSE * (self._median or SHORTEST_STEP) and now + gap > self._paused_until:
            self._before, self._paused_until = (self._step, self._at, self._median), now + gap
        median = self._members.median_step()
        if self._median is None and median and self._members.count < len(self._witnesses(now)):
            return  # it may be one learner's alone, while others recover
        self._median = median or self._median
