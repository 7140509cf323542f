"""How far a learner can have come: a larger step than that would have all rounds up to it skipped."""

from __future__ import annotations

import math

from ddiloco.protocol.membership import Membership
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import SyncerState

FASTEST = 16.0
"""How much faster than the median learner the furthest one may be, beyond an interval's lead."""

UNUSUAL = 4.0
"""The same, beyond which it is told: with a quorum of one, rounds and the end come by its clock alone."""

UNMEASURED = FASTEST * 1e-4
"""Seconds that the median step is taken to last, as long as none has been measured."""

PAUSE = 2.0
"""Median steps without a word of any learner that are a pause, of the syncer or of its network."""

FURTHER = 4.0
"""How much further than half of the learners one may have gone on unseen: while the syncer was away, or
before their steps were measured."""

FURTHEST_LEAP = 100_000
"""Steps that learners may have gone on while the syncer was away; a day is fewer, at one step a second.

One that says so is not believed: half of the learners that were there before must have come about as far.
"""


class SpeedLimit:
    """The furthest step that is credible: it moves no faster than the learners' measured speed allows.

    What learners said during a pause comes all at once after it. Then steps are measured from before the
    pause, and by the pace before it, for as long as it was.

    As long as most learners' steps have not been measured, one that is far ahead is believed as half of them
    bear it out. Those that the run starts with count among them before they come, and whoever was heard of,
    but nobody without a word for the silence timeout.
    """

    def __init__(self, policy: SyncPolicy, state: SyncerState) -> None:
        """`state`: what the syncer begins with; if that is not the start of the run, it was away."""
        self._policy = policy
        self._was_away = bool(state.step or state.incarnations)
        self._began: float | None = None
        self._step, self._at = float(state.step), 0.0  # where the furthest learner was certainly, and when
        self._median: float | None = None  # of a step, in seconds, as last known
        self._before: tuple[float, float, float | None] = self._step, 0.0, None  # these, as a pause began
        self._heard = self._paused_until = 0.0  # when a learner last spoke; until when the pause counts
        self._known = self._left = state.step  # the furthest step that was believed; and where the syncer was
        known = [m for m, _ in state.incarnations] if self._was_away else range(policy.num_learners)
        self._claims = dict.fromkeys(known, state.step)  # by learner, how far it says it has come
        self._since = state.step, 0.0  # the step from which the furthest learner's pace is measured, and when

    def allows(self, learner: int, step: int, members: Membership, merged_step: int, now: float) -> bool:
        """Whether the learner can have come to the step by now."""
        if self._began is None:
            self._began = self._at = self._heard = now
        self._listen(members, now)
        self._known = max(self._known, merged_step)
        self._claims[learner] = max(step, self._claims.get(learner, 0))
        if step <= self._known:
            return True
        if self._returning(now):  # a pace that one learner shows is no measure before the others are back
            return step <= self._vouched(learner, members, now, FURTHEST_LEAP)
        if step > self._certain(now) + self._policy.interval:
            return False
        return self._is_measured(now) or step <= self._vouched(learner, members, now)

    def reached(self, step: int, members: Membership, now: float) -> float | None:
        """A learner has come to a step that was credible; how many medians its pace is, if unusually many."""
        if step <= self._known:
            return None
        self._step = float(step) if self._returning(now) else min(float(step), self._certain(now))
        self._known, self._at = step, now
        gone = step - self._since[0]
        if gone < UNUSUAL * self._policy.interval and not self._returning(now):
            return None
        seconds, self._since = now - self._since[1], (step, now)
        pace = gone * (members.median_step() or 0.0) / seconds if seconds > 0 else 0.0
        return None if self._returning(now) or pace <= UNUSUAL else pace

    def may_be_vouched(self, step: int, now: float) -> bool:
        """Whether a step that is not allowed may be once others have come as far, or were measured."""
        if self._returning(now):
            return step <= self._left + FURTHEST_LEAP
        return not self._is_measured(now) and step <= self._certain(now) + self._policy.interval

    def _is_measured(self, now: float) -> bool:
        """Whether the pace is known by which steps are held against the time."""
        return (self._median if now >= self._paused_until else self._before[2]) is not None

    def _vouched(self, learner: int, members: Membership, now: float, most: float = math.inf) -> float:
        """How far the learner may have come by what the lower half of the claims says, or one of two."""
        witnesses = {learner, *self._witnesses(members, now)}
        said = sorted((self._claims[m] for m in witnesses), reverse=True)
        gone = said[(len(said) - 1) // 2] - self._left
        return self._left + min(most, FURTHER * max(0, gone)) + self._policy.interval

    def _witnesses(self, members: Membership, now: float) -> list[int]:
        """Who was heard of within the silence timeout; who has yet to come counts as if the first were it."""
        since, first = now - self._policy.silence_timeout, self._began or 0.0
        known = ((m, members.newest(m)) for m in self._claims)
        return [m for m, newest in known if max(first, newest.heard_at if newest else first) > since]

    def _returning(self, now: float) -> bool:
        """Whether learners still come back that went on while the syncer was away."""
        began = now if self._began is None else self._began
        return self._was_away and now < began + self._policy.silence_timeout

    def _listen(self, members: Membership, now: float) -> None:
        """Notices the end of a pause; the median is of before it, as its learners count as silent by now."""
        gap, self._heard = now - self._heard, now
        if gap > PAUSE * (self._median or UNMEASURED) and now + gap > self._paused_until:
            self._before, self._paused_until = (self._step, self._at, self._median), now + gap
        median = members.median_step()
        if self._median is None and median and members.count < len(self._witnesses(members, now)):
            return  # it may be that of one learner alone, while others recover
        self._median = median or self._median

    def _certain(self, now: float) -> float:
        certain = self._step + (now - self._at) * FASTEST / (self._median or UNMEASURED)
        if now >= self._paused_until:
            return certain
        before, at, median = self._before  # by what comes all at once, steps take microseconds
        return before + (now - at) * FASTEST / (median or UNMEASURED)
