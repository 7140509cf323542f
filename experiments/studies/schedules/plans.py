"""A fleet's plan, sampled from a seed: policy, conditions and faults, or a fair plan without faults."""

from __future__ import annotations

import dataclasses
import random

from ddiloco.protocol.events import TimingSet
from ddiloco.protocol.policy import SyncPolicy
from experiments.studies.schedules.conditions import Weather
from experiments.studies.schedules.faults import FAULTS


@dataclasses.dataclass(frozen=True)
class SchedulePlan:
    """Everything that a seed decides before the first event."""

    seed: int
    policy: SyncPolicy
    shards: int  # processes of the syncer
    total_steps: int
    weather: Weather
    storm: float  # seconds until everything works again
    joins: tuple[float, ...]  # by learner, when its first process starts; some come beyond the policy's M
    faults: tuple[tuple[float, str, int], ...]  # when, which of FAULTS, whom
    crash_in_merge: float = 0.0  # share of merges, during the storm, that the syncer dies in
    crash_at_commit: float = 0.0  # share of those after whose commit it dies, before its core handles it
    rollbacks: tuple[tuple[float, float], ...] = ()  # from when to when commits are lost with the disk
    snapshots: tuple[tuple[float, float], ...] = ()  # when one is taken, and when the run goes back to it
    retired: tuple[tuple[float, int], ...] = ()  # when, which learner leaves for good
    checkpoint_every: int | None = None  # steps; None: learners keep nothing on their disks
    timings: tuple[tuple[float, TimingSet], ...] = ()  # when which timing is ordered
    window: int | None = None  # steps of a learner, of which a good part must be merged; None: not asked for


def draw_policy(rng: random.Random) -> SyncPolicy:
    """Any preset, and the extremes: an interval of one step, more fragments than steps, no overlap, K = M."""
    learners = rng.randint(1, 5)
    interval = rng.choice([1, 1, 2, 3, 4, 6, 10])
    overlap = rng.choice([0, 1, 2, 3, interval + 2])
    kind = rng.choice(["decoupled", "decoupled", "decoupled", "all live", "streaming", "diloco"])
    return SyncPolicy(
        num_learners=learners,
        num_fragments=1 if kind == "diloco" else rng.choice([1, 2, 3, 5, 9]),
        interval=interval,
        overlap=overlap,
        quorum=rng.choice([1, learners, rng.randint(1, learners)]) if kind == "decoupled" else None,
        gamma=rng.choice([0.0, 0.5, 0.95, 0.95]),
        max_grace=rng.choice([0.0, 1.0, 2.0, 2.0]),
        max_run_ahead={"streaming": rng.randrange(interval), "diloco": 0}.get(kind),
        rebase=rng.choice([False, True]),
        offer_timeout=rng.uniform(3, 15),
        silence_timeout=rng.uniform(5, 20),
        resend_timeout=rng.uniform(3, 10),
    )


def draw_shards(seed: int | str, policy: SyncPolicy) -> int:
    """The number of the syncer's processes, each with a fragment at least."""
    return random.Random(f"shards {seed}").choice([n for n in (1, 1, 2, 3, 4) if n <= policy.num_fragments])


def draw_timings(seed: int, policy: SyncPolicy, storm: float) -> tuple[tuple[float, TimingSet], ...]:
    """Changes of the timing; none where learners wait for merges, and in most schedules."""
    rng = random.Random(f"timings {seed}")
    if policy.max_run_ahead is not None or rng.random() < 0.6:
        return ()
    times = sorted(rng.uniform(0, storm) for _ in range(rng.choice([1, 1, 2, 5])))
    return tuple((at, TimingSet.of(_retimed(rng, policy))) for at in times)


def _retimed(rng: random.Random, policy: SyncPolicy) -> SyncPolicy:
    """The policy with another timing, or with the one that it has."""
    all_live = policy.quorum is None
    changes = {
        "interval": rng.choice([1, 2, 3, 4, 6, 10, 24]),
        "overlap": rng.randint(0, policy.overlap),
        "quorum": None if all_live else rng.randint(1, policy.num_learners),
        "gamma": rng.choice([0.0, 0.5, 0.95]),
        "max_grace": rng.choice([0.0, 1.0, 2.0]),
    }
    kept = rng.sample(sorted(changes), rng.randint(0, len(changes)))
    return dataclasses.replace(policy, **{name: v for name, v in changes.items() if name not in kept})


def draw_weather(rng: random.Random) -> Weather:
    """From fair to foul."""
    return Weather(
        delay=rng.choice([0.01, 0.2, 1.0, 4.0]),
        loss=rng.choice([0.0, 0.05, 0.3]),
        duplicates=rng.choice([0.0, 0.0, 0.2]),
        unsound=rng.choice([0.0, 0.0, 0.1]),
        refused=rng.choice([0.0, 0.0, 0.1, 0.6]),
        speed_spread=rng.choice([0.0, 0.3, 4.0]),
        merge_time=rng.choice([0.01, 0.5, 5.0]),
    )


def draw_plan(seed: int) -> SchedulePlan:
    """The plan of a seed; the same on every machine."""
    rng = random.Random(seed)
    policy = draw_policy(rng)
    total = rng.randint(4, 50)
    storm = rng.uniform(0.3, 1.0) * total
    learners = range(policy.num_learners)
    kinds = rng.sample(sorted(FAULTS), rng.randint(0, len(FAULTS)))  # only some, for rare mixtures
    count = rng.choice([0, 2, 5, 10]) if kinds else 0
    faults = sorted((rng.uniform(0, storm), rng.choice(kinds), rng.choice(learners)) for _ in range(count))
    plan = SchedulePlan(
        seed=seed,
        policy=policy,
        shards=draw_shards(seed, policy),
        total_steps=total,
        weather=draw_weather(rng),
        storm=storm,
        joins=tuple(rng.choice([0.0, rng.uniform(0, storm)]) for _ in learners),
        faults=tuple(faults),
        crash_in_merge=rng.choice([0.0, 0.0, 0.0, 0.2]),
        crash_at_commit=rng.choice([0.0, 0.0, 0.0, 0.2]),
        rollbacks=rng.choice([(), (), ((rng.uniform(0, storm), storm),)]),
    )
    # Of its own source, so that whatever else a seed has drawn stays.
    skipped = random.Random(f"skipped steps {seed}").choice([0.0, 0.0, 0.0, 0.1, 0.6, 1.0])
    refuses_all = random.Random(f"all left out {seed}").random() < 0.1
    weather = dataclasses.replace(plan.weather, skipped=skipped, refuses_all=refuses_all)
    every = random.Random(f"checkpoints {seed}").choice([None, None, 1, 3, 10])
    taken = random.Random(f"snapshots {seed}")
    at = taken.uniform(0, storm)
    snapshots = taken.choice([(), (), ((at, taken.uniform(at, storm)),)])
    timings = draw_timings(seed, policy, storm)
    more = {"checkpoint_every": every, "snapshots": snapshots, "timings": timings}
    plan = dataclasses.replace(plan, weather=weather, **more)
    later = tuple(rng.uniform(0, storm) for _ in range(rng.choice([0, 0, 1, 2])))
    joins = (*plan.joins, *later)
    leaving = rng.sample(range(len(joins)), rng.randrange(len(joins))) if rng.random() < 0.3 else ()
    retired = tuple(sorted((rng.uniform(joins[m], storm), m) for m in leaving))
    return dataclasses.replace(plan, joins=joins, retired=retired)


def draw_fair(seed: int) -> SchedulePlan:
    """The plan of a seed in which no message is lost, no process dies, and the fleet is feasible.

    In an interval even the slowest and farthest can take an update, do a step on it and give that; the
    syncer merges for half of the time.
    """
    rng = random.Random(f"fair {seed}")
    learners = rng.randint(1, 12)
    weather = Weather(
        delay=rng.choice([0.01, 0.1, 0.3]),
        far=rng.choice([0.0, 0.0, 0.5, 1.0, 3.0]),
        speed_spread=rng.choice([0.0, 0.1, 0.6, 2.0]),
        jitter=rng.choice([0.0, 0.1, 0.5]),
        merge_time=rng.choice([0.01, 0.3, 1.0, 1.5]),
    )
    turn = 2 * (1 + weather.speed_spread + weather.far + 2 * weather.delay + weather.merge_time)
    interval = rng.choice([steps for steps in (6, 12, 24, 48) if steps >= turn])
    overlap = rng.choice([1, 2, 2, 3, 4])
    kind = rng.choice(["decoupled", "decoupled", "decoupled", "all live", "streaming", "diloco"])
    most = min(interval, 0.5 * interval / weather.merge_time)
    fragments = 1 if kind == "diloco" else rng.choice([n for n in (1, 2, 3, 6, 12, 24) if n <= most])
    policy = SyncPolicy(
        num_learners=learners,
        num_fragments=fragments,
        interval=interval,
        overlap=overlap,
        quorum=rng.choice([1, 1, learners, rng.randint(1, learners)]) if kind == "decoupled" else None,
        gamma=rng.choice([0.5, 0.8, 0.95]),
        max_grace=rng.choice([1.0, 2.0]),
        max_run_ahead={"streaming": rng.randint(1, 4), "diloco": 0}.get(kind),
        rebase=True,
    )
    joins = tuple(rng.uniform(0.0, 3.0) for _ in range(learners))
    shards = draw_shards(f"fair {seed}", policy)
    steps = min(16 * interval, 576)
    return SchedulePlan(
        seed, policy, shards, steps, weather, storm=0.0, joins=joins, faults=(), window=4 * interval
    )
