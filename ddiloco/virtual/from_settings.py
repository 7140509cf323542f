"""The virtual fleet of an experiment: hardware of its learners, and their availability by seed or trace."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping

from ddiloco.config import ConfigError
from ddiloco.goodput.accounting import State
from ddiloco.goodput.failures import draw_extra
from ddiloco.goodput.jobs import JobChange, draw_interruptions, job_changes, job_chips
from ddiloco.outer.encoding import Traffic
from ddiloco.protocol.events import TimingSet
from ddiloco.settings.experiment import BASELINES, Experiment, task_of
from ddiloco.settings.timing import timing_of
from ddiloco.virtual.array_ports import LearnerArrays, Observer, SyncerArrays
from ddiloco.virtual.availability import PAUSES, Change, read_trace
from ddiloco.virtual.fleet import Durations, Fleet
from ddiloco.virtual.learner_process import VirtualPlace
from ddiloco.virtual.links import Link, LinkQuality

_HORIZON = 20  # times the length of a run without failures: nothing is sampled beyond
_WHOLE = ("interval", "overlap", "quorum")  # of the timing
_EVENT = {state: event for event, state in PAUSES.items()} | {State.STEPPING: "step", State.FAILED: "fail"}


def base_learners(experiment: Experiment) -> int:
    """Number of permanent learners; others join and leave."""
    learners = experiment.sync.num_learners
    if experiment.virtual.availability != "spare_capacity" or experiment.algorithm in BASELINES:
        return learners
    return learners - experiment.virtual.spare_capacity.extra_learners


def chips_by_learner(experiment: Experiment) -> dict[int, int]:
    """The chips of each learner.

    Learner 0 of a baseline is its one job; further learners stand for its spares, or for chips that are added
    and removed, so that the metrics have them.
    """
    v, learners = experiment.virtual, experiment.sync.num_learners
    chips = v.chips(learners)
    if experiment.algorithm not in BASELINES:
        if v.availability == "failures":
            return job_chips(v.failures, chips, learners, elastic=True)
        return dict.fromkeys(range(learners), chips // learners)
    if experiment.algorithm == "lone_learner":
        return {0: chips // learners}
    if v.availability == "failures":
        return job_chips(v.failures, chips, 1, elastic=experiment.algorithm != "data_parallel")
    extra = v.spare_capacity.extra_learners if v.availability == "spare_capacity" else 0
    return {0: chips, **dict.fromkeys(range(1, extra + 1), chips // learners)}


def horizon(experiment: Experiment, exchange: float = 0.0) -> float:
    """Seconds for which failures are sampled: a run over links that keep up does not last that long.

    `exchange`: seconds that each step may wait for the network.
    """
    steps = experiment.train.steps
    if experiment.train.tokens is not None:
        rows = sum(experiment.batch_size(m) for m in range(base_learners(experiment)))
        steps = 1 + experiment.train.tokens // (rows * task_of(experiment).row_tokens)
    elif experiment.virtual.seconds is not None:
        steps = math.ceil(experiment.virtual.seconds / min(experiment.virtual.step_seconds))
    step = max(experiment.virtual.step_seconds) + exchange
    return _HORIZON * (steps + experiment.sync.interval) * step


def merge_timeout(experiment: Experiment, traffic: Traffic) -> float:
    """Seconds without a merge after which a run that makes no progress is ended."""
    v = experiment.virtual
    told = (
        max((change.time for change in changes_of(experiment)), default=0.0)
        if v.availability == "trace"
        else 0.0
    )
    sent = max(map(sum, traffic.offers)) + sum(traffic.version)
    transfers = sent / min(v.bandwidth) if v.bandwidth else 0.0
    turn = transfers + 2 * (max(v.latency) + max(v.jitter)) + v.merge_seconds
    return told + v.recovery_seconds + horizon(experiment) + _HORIZON * turn


def fleet_changes(experiment: Experiment, until: float) -> list[JobChange]:
    """The failure model's changes to the experiment's jobs: one for each learner, or one in all."""
    v = experiment.virtual
    jobs = 1 if experiment.algorithm in BASELINES else experiment.sync.num_learners
    chips = v.chips(experiment.sync.num_learners)
    interruptions = draw_interruptions(v.failures, chips, experiment.seed, until)
    elastic = experiment.algorithm != "data_parallel"
    return job_changes(v.failures, interruptions, chips, jobs, experiment.seed, until, elastic)


def changes_of(experiment: Experiment) -> list[Change]:
    """Changes of a decoupled run's learners, sampled or from the trace; may raise ConfigError."""
    v, learners = experiment.virtual, experiment.sync.num_learners
    match v.availability:
        case "trace":
            try:
                return read_trace(str(v.trace), learners)
            except ConfigError as error:
                raise ConfigError(f"config.virtual.trace: {error}") from None
        case "failures":
            return _changes_of_jobs(
                fleet_changes(experiment, horizon(experiment)), chips_by_learner(experiment)
            )
        case "spare_capacity":
            return _changes_of_extra(experiment)
    return []


def check_fleet(experiment: Experiment) -> None:
    """Raises ConfigError for an impossible fleet or a bad trace, before anything is compiled."""
    for problem in _problems(experiment):
        raise ConfigError(f"config.{problem}")
    if experiment.algorithm not in BASELINES:
        changes_of(experiment)
        timings_of(experiment)


def _problems(experiment: Experiment) -> Iterator[str]:
    """Settings without a possible fleet, each in a line that begins with the one to change."""
    v, algorithm, baseline = experiment.virtual, experiment.algorithm, experiment.algorithm in BASELINES
    if base_learners(experiment) < 1:
        yield (
            f"virtual.spare_capacity.extra_learners: is {v.spare_capacity.extra_learners}, but of "
            f"config.sync.num_learners, {experiment.sync.num_learners}, one at least must stay"
        )
    if v.availability != "steady" and algorithm == "lone_learner":
        why = "which is compared by its loss"
        yield f"virtual.availability: is {v.availability}, but must be steady for lone_learner, {why}"
    if v.availability == "trace" and baseline:
        needs = "it needs availability of failures, spare_capacity or steady"
        yield f"virtual.trace: tells of learners, but {algorithm} has none; {needs}"
    if v.availability == "spare_capacity" and algorithm == "data_parallel":
        does = "elastic_data_parallel does"
        yield f"virtual.availability: is spare_capacity, but data_parallel takes in no chips; {does}"
    for name in ("jitter", "loss") if baseline else ():
        if any(values := getattr(v, name)):
            takes = "whose exchange takes what config.virtual.latency and bandwidth say"
            yield f"virtual.{name}: is {values}, but must be 0 for {algorithm}, {takes}"
    if paced := experiment.train.min_step_seconds:
        says = "config.virtual.step_seconds says how long steps take"
        yield f"train.min_step_seconds: is {paced}, but must be () where driver is virtual: {says}"
    try:
        chips_by_learner(experiment)
    except ValueError as error:
        yield f"virtual.{error}"
    again = v.failures.step_seconds
    if v.availability == "failures" and again not in (0.0, *v.step_seconds):
        among = f"must be among config.virtual.step_seconds, {v.step_seconds}, or 0: nothing is done again"
        yield f"virtual.failures.step_seconds: is {again:g}, but {among}"
    if varies := v.failures.chip_speed_variation:
        differ = "learners differ by config.virtual.speed_variation and step_variation"
        yield f"virtual.failures.chip_speed_variation: is {varies:g}, but must be 0: {differ}"


def step_times(experiment: Experiment) -> list[Callable[[], float]]:
    """For each learner, a source of the seconds of its next step on all its chips."""
    v = experiment.virtual

    def source(learner: int) -> Callable[[], float]:
        rng = random.Random(f"{experiment.seed} speed {learner}")
        mean = v.of("step_seconds", learner) * spread(rng, v.speed_variation)
        return lambda: mean * spread(rng, v.step_variation)

    return [source(m) for m in range(experiment.sync.num_learners)]


def make_fleet(
    experiment: Experiment,
    total_steps: int | None,
    learner_arrays: Callable[[int], LearnerArrays],
    syncer_arrays: SyncerArrays,
    observer: Observer,
) -> Fleet:
    """The experiment's fleet with its changes scheduled; the same experiment gives the same run."""
    v = experiment.virtual
    chips = chips_by_learner(experiment)
    times = step_times(experiment)

    def link(learner: int, direction: str) -> Link:
        bandwidth = v.of("bandwidth", learner) if v.bandwidth else None
        quality = LinkQuality(
            v.of("latency", learner), bandwidth, v.of("jitter", learner), v.of("loss", learner)
        )
        return Link(quality, random.Random(f"{experiment.seed} {direction} {learner}"))

    places = {m: VirtualPlace(times[m], link(m, "up"), link(m, "down"), chips[m]) for m in range(len(times))}
    fleet = Fleet(
        experiment.sync,
        total_steps,
        places,
        learner_arrays,
        syncer_arrays,
        takes=Durations(lambda: v.merge_seconds, v.failures.detection_seconds, v.recovery_seconds),
        observer=observer,
    )
    fleet.schedule(changes_of(experiment))
    for time, timing in timings_of(experiment):
        fleet.calendar.at(time, fleet.set_timing, timing)
    return fleet


def timings_of(experiment: Experiment) -> list[tuple[float, TimingSet]]:
    """The changes of the run's timing, by time; may raise ConfigError."""
    found, changes = [], dict[str, int | float]()
    for time, name, value in sorted(experiment.virtual.timings):
        changes[name] = int(value) if name in _WHOLE and value.is_integer() else value
        found.append((time, timing_of(experiment.sync, changes, "config.virtual.timings")))
    return found


def spread(rng: random.Random, deviation: float) -> float:
    """A normal factor about 1, at least 0.1; with a deviation of 0 it is 1, and nothing is sampled."""
    return max(0.1, rng.gauss(1.0, deviation)) if deviation else 1.0


def _changes_of_jobs(changes: list[JobChange], chips: Mapping[int, int]) -> list[Change]:
    """Turns the changes of jobs into those of learners; a learner's process dies only with all its chips."""
    found: list[Change] = []
    dead: set[int] = set()
    for change in changes:
        event = _EVENT.get(change.state)
        if event is None or (change.time == 0 and event == "step"):
            continue
        if change.job in dead and event != "fail":
            dead.discard(change.job)
            found.append(Change(change.time, change.job, "recover"))
        elif event == "fail":
            if change.job in dead:
                continue
            dead.add(change.job)
        share = change.chips / chips[change.job] if event == "step" else 1.0
        found.append(Change(change.time, change.job, event, share))
    return found


def _changes_of_extra(experiment: Experiment) -> list[Change]:
    base = base_learners(experiment)
    present = 0
    found: list[Change] = []
    drawn = draw_extra(experiment.virtual.spare_capacity, base, experiment.seed, horizon(experiment))
    for time, count in drawn:
        found += [Change(time, base + j, "join") for j in range(present, count)]
        found += [Change(time, base + j, "leave") for j in reversed(range(count, present))]
        present = count
    absent = set(range(base, experiment.sync.num_learners)) - {c.learner for c in found}
    # A learner that never joins needs a change too, or it would be there from the start.
    return found + [Change(horizon(experiment), learner, "join") for learner in sorted(absent)]
