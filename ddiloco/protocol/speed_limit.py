"""How far a learner can have come: a larger step than that would have all rounds up to it skipped."""

from __future__ import annotations

from ddiloco.protocol.membership import Membership
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import SyncerState

FASTEST = 16.0
"""How much faster than the median learner the furthest one may be, beyond an interval's lead."""

SHORTEST_STEP = 1e-3
"""Seconds that a step takes at least, as long as none has been measured."""

FURTHER = 4.0
"""How much further than half of the learners one may have gone on while the syncer was away."""

FURTHEST_LEAP = 100_000
"""Steps that learners may have gone on while the syncer was away; a day is fewer, at one step a second.

One that says so is not believed: half of the learners that were there before must have come about as far.
"""


class SpeedLimit:
    """The furthest step that is credible: it moves no faster than the learners' measured speed allows."""

    def __init__(self, policy: SyncPolicy, state: SyncerState) -> None:
        """`state`: what the syncer begins with; if that is not the start of the run, it was away."""
        self._policy = policy
        self._was_away = bool(state.step or state.incarnations)
        self._began: float | None = None
        self._step, self._at = float(state.step), 0.0  # where the furthest learner was certainly, and when
        self._known = self._left = state.step  # the furthest step that was believed; and where the syncer was
        self._claims = dict.fromkeys((learner for learner, _ in state.incarnations), state.step)

    def allows(self, learner: int, step: int, members: Membership, merged_step: int, now: float) -> bool:
        """Whether the learner can have come to the step by now."""
        if self._began is None:
            self._began = self._at = now
        self._known = max(self._known, merged_step)
        if self._returning(now):
            self._claims[learner] = max(step, self._claims.get(learner, 0))
        if step <= self._known:
            return True
        if self._returning(now):  # a pace that one learner shows is no measure before the others are back
            return step <= self._vouched()
        return step <= self._certain(members, now) + self._policy.interval

    def reached(self, step: int, members: Membership, now: float) -> None:
        """A learner has come to a step that was credible."""
        if step > self._known:
            certain = self._certain(members, now)
            self._step = float(step) if self._returning(now) else min(float(step), certain)
            self._known, self._at = step, now

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

    def _certain(self, members: Membership, now: float) -> float:
        times = sorted(m.step_time.value for m in members.live() if m.step_time.value)
        shortest = times[(len(times) - 1) // 2] / FASTEST if times else SHORTEST_STEP
        return self._step + (now - self._at) / shortest
