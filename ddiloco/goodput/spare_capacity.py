"""Scavenging: learners that come while a cluster has capacity to spare, and go when it is wanted elsewhere.

The spare capacity is 0 with probability 1 - free_share, else exponentially distributed with mean mean_size,
in units of the base fleet; it is drawn again at the times of a Poisson process. Each of the E extra learners
is as large as one of the B base learners; number j is there while the capacity is at least j / B. On average

    free_share * sum over j = 1 .. E of exp(-j / (B * mean_size))

extra learners are there: each further one brings less, as in the paper's scavenging experiment.
"""

from __future__ import annotations

import dataclasses
import math
import random

from ddiloco.config import setting


@dataclasses.dataclass(frozen=True)
class SpareCapacity:
    """How much there is to scavenge, and for how long."""

    extra_learners: int = setting(0, "learners that come and go, beside those that stay", at_least=0)
    free_share: float = setting(
        0.58, "share of the time in which the cluster has anything to spare", at_least=0.0, at_most=1.0
    )
    mean_size: float = setting(1.5, "mean of what it then has, in base fleets", above=0.0)
    dwell_seconds: float = setting(600.0, "mean time until the spare capacity is another", above=0.0)


def draw_extra(model: SpareCapacity, base: int, seed: int, horizon: float) -> list[tuple[float, int]]:
    """How many extra learners are there, from each time (seconds) on, until `horizon`; it begins at time 0.

    The draws do not depend on the number of extra learners: fleets with more of them meet the same capacity.
    """
    rng = random.Random(f"spare capacity {seed}")
    counts: list[tuple[float, int]] = []
    now = 0.0
    while now < horizon:
        size = rng.expovariate(1 / model.mean_size) if rng.random() < model.free_share else 0.0
        count = min(model.extra_learners, math.floor(size * base))
        if not counts or counts[-1][1] != count:
            counts.append((now, count))
        now += rng.expovariate(1 / model.dwell_seconds)
    return counts
