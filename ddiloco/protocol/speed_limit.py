"""How far a learner can have come: a larger step than that would have all rounds up to it skipped."""

from __future__ import annotations

from ddiloco.protocol.membership import Membership
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import SyncerState

FASTEST = 16.0
"""How much faster than the median learner the furthest one may be, beyond an interval's lead."""

UNUSUAL = 4.0
"""The same, beyond which it is told: with a quorum of one, rounds and the end come by its clock alone."""

SHORTEST_STEP = 1e-4
"""Seconds that a step takes at least, as long as none has been measured."""

PAUSE = 2.0
"""Median steps without a word of any learner that are a pause, of the syncer or of its network."""

FURTHER = 4.0
"""How much further than half of the learners one may have gone on while the syncer was away."""

FURTHEST_LEAP = 100_000
"""Steps that learners may have gone on while the syncer was away; a day is fewer, at one step a second.

One that says so is not believed: half of the learners that were there before must have come about as far.
"""


class SpeedLimit:
    """The furthest step that is credible: it moves no faster than the learners' measured speed allows.

    What learners said during a pause comes all at once after it. Then steps are measured from before the
    pause, and by the pace before it, for as long as it was.
    """

    def __init__(self, policy: SyncPolicy, state: SyncerState) -> None:
        """`state`: what the syncer begins with; if that is not the start of the run, it was away."""
        self._policy = policy
        self._was_away = bool(state.step or state.incarnations)
        self._began: float | None = None
        self._step, self._at = float(state.step), 0.0  # where the furthest learner was certainly, and when
        self._median = FASTEST * SHORTEST_STEP  # of a step, in seconds, as last known
        self._before = self._step, self._at, 1.0  # as the last pause began: step, time and median
        self._heard = self._paused_until = 0.0  # when a learner last spoke; until when the pause counts
        self._known = self._left = state.step  # the furthest step that was believed; and where the syncer was
        self._claims = dict.fromkeys((learner for learner, _ in state.incarnations), state.step)
        self._since = state.step, 0.0  # the step from which the furthest learner's pace is measured, and when

    def allows(self, learner: int, step: int, members: Membership, merged_step: int, now: float) -> bool:
        """Whether the learner can have come to the step by now."""
        if self._began is None:
            self._began = self._at = self._heard = now
        self._listen(members, now)
        self._known = max(self._known, merged_step)
        if self._returning(now):
            self._claims[learner] = max(step, self._claims.get(learner, 0))
        if step <= self._known:
            return True
        if self._returning(now):  # a pace that one learner shows is no measure before the others are back
            return step <= self._vouched()
        return step <= self._certain(now) + self._policy.interval

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
        """Whether a step that is not allowed may be once other learners are back that went on as far."""
        return self._returning(now) and step <= self._left + FURTHEST_LEAP

    def _vouched(self) -> float:
        """How far the furthest may have come by what the lower half of the claims says, or one of two."""
        claims = sorted(self._claims.values(), reverse=True)
        gone = claims[(len(claims) - 1) // 2] - self._left
        return self._left + min(FURTHEST_LEAP, FURTHER * max(0, gone)) + self._policy.interval

    def _returning(self, now: float) -> bool:
        """Whether learners still come back that went on while the syncer was away."""
        began = now if self._began is None else self._began
        return self._was_away and now < began + self._policy.silence_timeout

    def _listen(self, members: Membership, now: float) -> None:
        """Notices the end of a pause; the median is of before it, as its learners count as silent by now."""
        gap, self._heard = now - self._heard, now
        if gap > PAUSE * self._median and now + gap > self._paused_until:
            self._before, self._paused_until = (self._step, self._at, self._median), now + gap
        self._median = members.median_step() or self._median

    def _certain(self, now: float) -> float:
        certain = self._step + (now - self._at) * FASTEST / self._median
        if now >= self._paused_until:
            return certain
        before, at, median = self._before  # by what comes all at once, steps take microseconds
        return before + (now - at) * FASTEST / median
