"""What a learner that is thin, far or slow is worth to its run: with it, without it, and with fewer bytes."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator

from experiments.studies.planning.choices import NARROW, Choice, Fleet
from experiments.studies.replay.outcomes import FleetOutcome

MOST = 3  # learners that are looked at
LOW = 0.9  # of the median share, below which a learner is looked at


@dataclasses.dataclass(frozen=True)
class Worth:
    """A learner with three plays of its run's own settings."""

    learner: int
    present: FleetOutcome
    without: FleetOutcome
    narrow: FleetOutcome | None  # None: it sends in NARROW already

    @property
    def lines(self) -> Iterator[str]:
        """What the plays come to."""
        m, there = self.learner, self.present
        own = f"{there.shares.get(m, 0.0):.0%} of its work is merged"
        if m in there.ages:
            own += f", {there.ages[m]:.1f} steps old"
        yield f"learner {m}: {own}; {_others(there, m)}"
        rate = self.without.tokens / max(1e-9, self.without.seconds)
        before = there.tokens / max(1e-9, there.seconds)
        yield f"  without it: {rate / before - 1:+.1%} merged tokens a second; {_others(self.without, m)}"
        if self.narrow is not None:
            now = f"{self.narrow.shares.get(m, 0.0):.0%} of its work is merged"
            yield f"  with {NARROW} for it alone: {now}; {_others(self.narrow, m)}"

    @property
    def verdict(self) -> str:
        """What to do."""
        there, narrow = self.present, self.narrow
        gain = 0.0 if narrow is None else narrow.shares.get(self.learner, 0.0) - there.shares[self.learner]
        if gain > 0.1:
            return f"a codec of fewer bytes for its offers is worth {gain:.0%} of its work"
        if there.shares.get(self.learner, 0.0) < 0.1:
            return "drain it, or give it a better link: hardly any of its work counts"
        return "keep it"


def _others(outcome: FleetOutcome, learner: int) -> str:
    shares = [share for m, share in outcome.shares.items() if m != learner]
    ages = [age for m, age in outcome.ages.items() if m != learner]
    if not shares:
        return "there are no others"
    return f"of the others {statistics.fmean(shares):.0%}, {statistics.fmean(ages or [0.0]):.1f} steps old"


def conspicuous(outcome: FleetOutcome) -> list[int]:
    """Learners of whose work less is merged than of the others', or later; the worst first."""
    if len(outcome.shares) < 2:
        return []
    share, age = statistics.median(outcome.shares.values()), statistics.median(outcome.ages.values() or [0.0])
    found = [
        m for m, own in outcome.shares.items() if own < LOW * share or outcome.ages.get(m, 0.0) > 3 + 3 * age
    ]
    return sorted(found, key=lambda m: (outcome.shares[m], -outcome.ages.get(m, 0.0)))[:MOST]


def worth_of(fleet: Fleet, own: Choice, present: FleetOutcome) -> list[Worth]:
    """The worth of each conspicuous learner."""

    def narrow(learner: int) -> FleetOutcome | None:
        return None if own.codec == NARROW else fleet(own, narrow=(learner,))

    found = conspicuous(present)
    return [Worth(m, present, fleet(own, without=(m,)), narrow(m)) for m in found]
