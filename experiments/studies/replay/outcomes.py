"""The outcome of a fleet's rounds, from its records."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ddiloco.telemetry import records


@dataclasses.dataclass(frozen=True)
class FleetOutcome:
    """What the rounds of a run come to; without a merge, means are 0."""

    merged: int  # rounds that were merged; `skipped` and `abandoned` were not
    skipped: int  # as the syncer was too late
    abandoned: int  # at the end, without their quorum
    contributions: float  # in a merge, on average
    tokens: int  # that were merged, of each fragment
    quorum_seconds: float  # from the opening of a round to its quorum, on average
    grace_seconds: float  # that windows were open, likewise
    sync_seconds: float  # from the merge's begin to the broadcast, likewise
    seconds: float  # until the last merge
    share: float  # of the trained tokens that were merged
    work: float  # steps in a contribution, on average over tokens
    age: float  # steps that its learner took between a contribution and its merge, likewise
    bytes_sent: float  # for each trained token
    shares: Mapping[int, float]  # the share by learner
    ages: Mapping[int, float]  # the age by learner that was merged

    @property
    def worst(self) -> float:
        """The least share of a learner."""
        return min(self.shares.values(), default=0.0)


def between(recorded: Iterable[Any], begin: float, end: float = math.inf) -> Iterator[Any]:
    """The records of these seconds; those without a time are left out."""
    return (record for record in recorded if begin <= getattr(record, "time", -math.inf) < end)


def outcome_of(recorded: Iterable[Any], fragments: int) -> FleetOutcome:
    """The outcome of a fleet with so many fragments, by its records in order."""
    counts: collections.Counter[str] = collections.Counter()
    clocks: dict[int, int] = {}
    trained: collections.Counter[int] = collections.Counter()
    merged: collections.Counter[int] = collections.Counter()
    rounds: list[Mapping[str, Any]] = []
    aged: collections.Counter[int] = collections.Counter()
    work = sent = last = 0.0
    for record in recorded:
        match record:
            case records.StepDone(learner=m, step=step, tokens=tokens):
                clocks[m] = max(step, clocks.get(m, 0))
                trained[m] += tokens
            case records.Transferred(sent=size):
                sent += size
            case records.Noted(name="round", values=values, time=time):
                rounds.append(values)
                last = time
                for m, _, _, step, steps, tokens in values["contributions"]:
                    merged[m] += tokens
                    work += tokens * steps
                    aged[m] += tokens * max(0, clocks.get(m, 0) - step)
            case records.Noted(name=name):
                counts[name] += 1

    def mean(name: str) -> float:
        return statistics.fmean(r[name] for r in rounds) if rounds else 0.0

    most = max(1, merged.total())
    return FleetOutcome(
        merged=len(rounds),
        skipped=counts["round_skipped"],
        abandoned=counts["round_abandoned"],
        contributions=mean("quorum"),
        tokens=merged.total(),
        quorum_seconds=mean("quorum_seconds"),
        grace_seconds=mean("grace_seconds"),
        sync_seconds=mean("sync_seconds"),
        seconds=last,
        share=merged.total() / fragments / max(1, trained.total()),
        work=work / most,
        age=aged.total() / most,
        bytes_sent=sent / max(1, trained.total()),
        shares={m: merged[m] / fragments / tokens for m, tokens in sorted(trained.items()) if tokens},
        ages={m: aged[m] / tokens for m, tokens in sorted(merged.items()) if tokens},
    )
