"""Models of a fleet's conditions: interruptions of its chips, and spare capacity to scavenge."""

from __future__ import annotations

import dataclasses
import math
import random

from ddiloco.config import setting

YEAR = 365.25 * 24 * 3600.0  # seconds


@dataclasses.dataclass(frozen=True)
class FailureModel:
    """Rates and durations of interruptions, which are exponentially distributed.

    From the paper's failure simulation; values: docs/results/goodput.md.
    """

    mtbi_years: float = setting(1.0, "years between two interruptions of one chip, on average", above=0.0)
    chips_per_slice: int = setting(256, "chips that an interruption of one of them takes away", at_least=1)
    detection_seconds: float = setting(
        10.0,
        "seconds until a job knows why it stands still, or a syncer that a learner is dead",
        at_least=0.0,
    )
    downscale_seconds: float = setting(3.4, "seconds to go on without the lost slices", at_least=0.0)
    upscale_seconds: float = setting(14.1, "seconds to take returned slices in", at_least=0.0)
    upscale_wait_seconds: float = setting(
        27.1, "seconds from the first return that is not in yet until an upscale begins", at_least=0.0
    )
    return_seconds: float = setting(600.0, "seconds until a lost slice is back, on average", at_least=0.0)
    restart_seconds: float = setting(
        58.7,
        "seconds to start a whole job again: an inelastic one, or one that had lost all",
        at_least=0.0,
    )
    spare_share: float = setting(
        0.054, "share of its slices that a job without elasticity keeps as spares", at_least=0.0, below=1.0
    )
    step_seconds: float = setting(5.0, "seconds of one step; what is lost of it is done again", at_least=0.0)
    chip_speed_variation: float = setting(
        0.0,
        "standard deviation of a chip's step time, as a share of the step; a job goes at its slowest chip's",
        at_least=0.0,
    )

    @property
    def mtbi_seconds(self) -> float:
        """Seconds between two interruptions of one chip, on average."""
        return self.mtbi_years * YEAR

    def num_slices(self, num_chips: int) -> int:
        """Whole slices in `num_chips` chips; the remaining chips are not used."""
        return num_chips // self.chips_per_slice


@dataclasses.dataclass(frozen=True)
class Division:
    """Slices of a fleet by job: job 0 has the first ones, and so on; spares come last."""

    slices_by_job: tuple[int, ...]
    spares: int  # slices on standby


def divide(model: FailureModel, num_chips: int, num_jobs: int, elastic: bool) -> Division:
    """Divides a fleet evenly; inelastic jobs leave spares. Raises ValueError for fewer slices than jobs."""
    slices = model.num_slices(num_chips)
    if slices < num_jobs:
        raise ValueError(
            f"num_chips: {num_chips} chips are {slices} slices of {model.chips_per_slice}, but {num_jobs} "
            f"{'learner needs' if num_jobs == 1 else 'learners need'} at least one each"
        )
    spares = 0 if elastic else min(round(model.spare_share * slices), slices - num_jobs)
    each, more = divmod(slices - spares, num_jobs)
    return Division(tuple(each + (job < more) for job in range(num_jobs)), spares)


@dataclasses.dataclass(frozen=True)
class SpareCapacity:
    """Scavenging: learners that join while a cluster has spare capacity, and leave when it is needed.

    The spare capacity is 0 with probability 1 - free_share, else exponentially distributed with mean
    mean_size, in units of the base fleet; it is sampled anew at the times of a Poisson process. Each of the E
    extra learners is as large as one of the B base learners; number j trains while the capacity is at least
    j / B. On average

        free_share * sum over j = 1 .. E of exp(-j / (B * mean_size))

    extra learners are present: each further one brings less, as in the paper's scavenging experiment.
    """

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
