"""Faults of real processes: how often which of them, and the plan that a seed draws from that."""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Sequence

from ddiloco.config import setting

KINDS = ("kill", "hang", "partition")
SYNCER = "syncer"
HOSTILE = "experiments.studies.chaos.hostile"  # plays a learner
DEEDS = "hostile.json"  # what that did, beside the run


def learner_name(learner: int) -> str:
    """The name under which a learner's process meets its faults."""
    return f"learner {learner}"


@dataclasses.dataclass(frozen=True)
class ProcessChaos:
    """What befalls the processes of a run, and when; all from the seed."""

    seed: int = setting(0, "of the plan", at_least=0)
    steady_seconds: float = setting(
        10.0, "seconds that all learners have stepped before the first fault", at_least=0.0
    )
    seconds: float = setting(570.0, "seconds for which faults come, after that", at_least=0.0)
    learner_every: float = setting(10.0, "seconds between two faults of one learner, on average", above=0.0)
    syncer_every: float | None = setting(
        28.0, "seconds between two faults of the syncer, on average; None: it has none", above=0.0
    )
    spared_seconds: float = setting(
        4.0,
        "seconds after a fault of the syncer in which learners have none, as they could not return",
        at_least=0.0,
    )
    hang_share: float = setting(
        0.04, "share of the faults that stop a process, which later goes on", at_least=0.0, at_most=1.0
    )
    partition_share: float = setting(
        0.04, "share of a learner's faults that cut it off from the syncer", at_least=0.0, at_most=1.0
    )
    hang_seconds: float = setting(
        5.0, "mean seconds of a hang, drawn between a half and one and a half of it", above=0.0
    )
    partition_seconds: float = setting(5.0, "the same of a partition", above=0.0)
    hostile: bool = setting(
        False,
        "whether the last learner is a peer that lies, beside one without credentials, all the while",
    )

    def __post_init__(self) -> None:
        if self.hang_share + self.partition_share > 1:
            raise ValueError(
                f"hang_share: is {self.hang_share:g}, but with partition_share, "
                f"{self.partition_share:g}, must be at most 1"
            )


@dataclasses.dataclass(frozen=True)
class PlannedFault:
    """A fault that is to come, `time` seconds after the beginning of the plan."""

    time: float
    target: str  # SYNCER, or a `learner_name`
    kind: str  # of KINDS
    duration: float = 0.0  # seconds until it is undone; of a kill the launcher restarts the process


def draw_plan(chaos: ProcessChaos, num_learners: int) -> tuple[PlannedFault, ...]:
    """The faults in the order of their times; the same on every machine.

    Time is cut into slots with one fault of a learner each, at any moment of its slot, but for those that
    come too soon after a fault of the syncer. None of the last M - 2 slots' learners is the target: where a
    process is back within so many slots, two learners live.
    """
    faults = _of_learners(chaos, num_learners, random.Random(f"faults of learners {chaos.seed}"))
    if chaos.syncer_every is not None:
        rng = random.Random(f"faults of the syncer {chaos.seed}")
        times = _times(chaos.seconds, chaos.syncer_every, rng)
        spared = chaos.spared_seconds
        faults = [f for f in faults if not any(time <= f.time < time + spared for time in times)]
        faults += [_fault(chaos, time, SYNCER, rng) for time in times]
    shift = chaos.steady_seconds
    return tuple(
        dataclasses.replace(f, time=f.time + shift) for f in sorted(faults, key=lambda f: (f.time, f.target))
    )


def _of_learners(chaos: ProcessChaos, num_learners: int, rng: random.Random) -> list[PlannedFault]:
    recent: collections.deque[int] = collections.deque(maxlen=max(0, num_learners - 2))
    faults = []
    for time in _times(chaos.seconds, chaos.learner_every / num_learners, rng):
        learner = rng.choice([m for m in range(num_learners) if m not in recent])
        recent.append(learner)
        faults.append(_fault(chaos, time, learner_name(learner), rng))
    return faults


def _times(seconds: float, every: float, rng: random.Random) -> Sequence[float]:
    """One moment in each whole slot of `every` seconds."""
    return [(slot + rng.random()) * every for slot in range(int(seconds / every))]


def _fault(chaos: ProcessChaos, time: float, target: str, rng: random.Random) -> PlannedFault:
    draw, stretch = rng.random(), rng.uniform(0.5, 1.5)
    if draw < chaos.hang_share:
        return PlannedFault(time, target, "hang", chaos.hang_seconds * stretch)
    if target != SYNCER and draw < chaos.hang_share + chaos.partition_share:
        return PlannedFault(time, target, "partition", chaos.partition_seconds * stretch)
    return PlannedFault(time, target, "kill")
