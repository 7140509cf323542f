"""Scavenging: learners that join while a cluster has spare capacity, and leave when it is needed.

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
    """The spare capacity of a cluster over time."""

    extra_learners: int = setting(0, "learners that join and leave, beside the permanent ones", at_least=0)
    free_share: float = setting(0.58, "share of the time with any spare capacity", at_least=0.0, at_most=1.0)
    mean_size: float = setting(1.5, "mean spare capacity in that time, in base fleets", above=0.0)
    dwell_seconds: float = setting(600.0, "mean time between changes of the spare capacity", above=0.0)


def draw_extra(model: SpareCapacity, base: int, seed: int, horizon: float) -> list[tuple[float, int]]:
    """(time in seconds, number of extra learners) at each change from time 0 to `horizon`.

    The capacity does not depend on the number of extra learners: larger fleets have the same one.
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
