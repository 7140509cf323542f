"""What a thin, far or slow learner is worth to its run: with it, without it, with another codec for it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator

from experiments.studies.planning.choices import NARROW, Choice, Fleet, Played
from experiments.studies.replay.outcomes import FleetOutcome

MOST = 3  # learners that are looked at
LOW = 0.9  # of the median share, below which a learner is looked at


@dataclasses.dataclass(frozen=True)
class Worth:
    """A learner with three plays of its run's own settings."""

    learner: int
    present: FleetOutcome
    without: FleetOutcome
    narrow: Played | None  # with NARROW for it alone; None: it sends in that already

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
            outcome = self.narrow.outcome
            now = f"{outcome.shares.get(m, 0.0):.0%} of its work is merged"
            yield f"  with another codec for it alone, {NARROW}: {now}; {_others(outcome, m)}"

    @property
    def verdict(self) -> str:
        """What to do."""
        share = self.present.shares.get(self.learner, 0.0)
        if self.narrow is not None:
            gain = self.narrow.outcome.shares.get(self.learner, 0.0) - share
            if gain > 0.1:
                codecs = self.narrow.choice.flags["outer.codec"]
                return f"{NARROW} for it alone is worth {gain:.0%} of its work: --config.outer.codec={codecs}"
        if share < 0.1:
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


def worth_of(fleet: Fleet, own: Choice, present: FleetOutcome, learners: int) -> list[Worth]:
    """The worth of each conspicuous learner of so many."""

    def narrow(learner: int) -> Played | None:
        choice = own.narrowed(learner, learners)
        return None if own.codec_of(learner) == NARROW else Played(choice, fleet(choice))

    found = conspicuous(present)
    return [Worth(m, present, fleet(own, without=(m,)), narrow(m)) for m in found]
