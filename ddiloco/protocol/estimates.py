"""Running time estimates, and the slack and grace window that follow from them (paper, "Slack and grace")."""

from __future__ import annotations

import dataclasses

RATE = 0.2  # weight of the newest sample
DEVIATIONS = 4.0  # mean deviations above the average that samples seldom exceed


@dataclasses.dataclass
class MovingAverage:
    """An exponential moving average that starts at its first sample."""

    value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else self.value + RATE * (sample - self.value)


@dataclasses.dataclass
class Delay:
    """Seconds that vary: their moving average and mean deviation, as for TCP's retransmissions (RFC 6298)."""

    value: float | None = None
    deviation: float = 0.0

    def add(self, sample: float) -> None:
        if self.value is None:
            self.value, self.deviation = sample, sample / 2
            return
        self.deviation += RATE * (abs(sample - self.value) - self.deviation)
        self.value += RATE * (sample - self.value)

    @property
    def bound(self) -> float:
        """An upper bound for most samples."""
        return (self.value or 0.0) + DEVIATIONS * self.deviation


@dataclasses.dataclass(frozen=True)
class OfferDelay:
    """Measured lateness of a learner's offers, in seconds; durable across restarts of the syncer."""

    lag: float  # behind a round's quorum, moving average of those that came after it; 0: none did
    deviation: float  # of that, mean
    delivery: float  # from the step to the offer's arrival, moving average


def slack(overlap: int, step_time: float, quorum_time: float, sync_time: float) -> float:
    """Seconds by which a round's result would come early: tau * xi_step - (xi_quorum + xi_sync)."""
    return overlap * step_time - (quorum_time + sync_time)


def grace(gamma: float, slack_seconds: float, longest: float) -> float:
    """Seconds to let further learners in: gamma * slack, never negative, never above `longest`."""
    return min(max(gamma * slack_seconds, 0.0), longest)
