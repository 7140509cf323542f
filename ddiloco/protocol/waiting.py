"""For whose offers a merge waits: by how late each learner's have been, and what the others lose by it."""

from __future__ import annotations

from collections.abc import Iterable

from ddiloco.protocol.membership import Member
from ddiloco.protocol.round import Round

AGE = 0.5
"""What a merge loses of an offer's worth where that is made an interval older."""

BEHIND_ANOTHER = 2.0
"""How many times as long as its offers take a learner is waited for at least: one may come behind another."""


def worth_waiting(
    r: Round, able: Iterable[Member], interval: float, next_quorum: float, now: float
) -> tuple[set[int], float]:
    """The learners whose offers a merge waits for as its quorum is complete, and for how many seconds.

    An offer adds its learner's work of an interval. A wait of a share s of the interval makes the work of all
    that are in the merge older by s, and worth half as much less. Of the learners in the order in which they
    are expected, as many are waited for as make the most of the difference. Not waited for is one whose lag
    was never measured, or whose last offer came later than it was expected.

    Args:
      able: who may still give.
      interval: seconds that the fastest learner takes for one.
      next_quorum: seconds until the fragment's next one; nobody is waited for longer.
    """
    coming = []
    for m in able:
        asked = r.owed.get(m.learner)
        if asked is None:
            continue
        asked.quorum_at = now
        if m.lag.value is None:
            continue
        bound = max(m.lag.bound, BEHIND_ANOTHER * (m.delivery.value or 0.0))
        asked.expected_at = now + bound
        if m.punctual and m.lag.value <= next_quorum:
            coming.append((m.lag.value, m.learner, bound))
    coming.sort()
    gains = [
        number - AGE * lag / interval * (len(r.arrived) + number)
        for number, (lag, _, _) in enumerate(coming, start=1)
    ]
    best = max(gains, default=0.0)
    many = gains.index(best) + 1 if best > 0 else 0
    longest = max((latest for _, _, latest in coming[:many]), default=0.0)
    return {learner for _, learner, _ in coming[:many]}, min(longest, next_quorum)
