"""The baselines in virtual time: one synchronous job with the speeds and failures of a fleet."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from ddiloco.baselines.wall import JobArrays
from ddiloco.goodput.accounting import State
from ddiloco.goodput.failures import draw_extra
from ddiloco.settings.experiment import Experiment, task_of
from ddiloco.telemetry import records
from ddiloco.virtual.from_settings import chips_by_learner, fleet_changes, horizon, step_times
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.evaluator import Evaluations
from ddiloco.workers.run_result import Outcome

_GRADIENT_BYTES = 2  # of an element of a gradient: bfloat16
_BACKWARD_SHARE = 2 / 3  # of a step's time; it has twice the operations of the forward pass


@dataclasses.dataclass(frozen=True)
class JobPhase:
    """State and speed of the job's chips from `time` on; `speed` 1 is that of a whole steady fleet."""

    time: float  # virtual seconds
    state: State
    speed: float  # 0 where the job stands still
    states: tuple[tuple[int, State, int], ...] = ()  # of every learner in the metrics: state and chips


def phases(experiment: Experiment, exchange: float = 0.0) -> list[JobPhase]:
    """The phases of the job, from time 0 on; it meets the same failures as a fleet of learners.

    `exchange`: seconds that an exchange of gradients takes.
    """
    v = experiment.virtual
    chips, until = chips_by_learner(experiment), horizon(experiment, exchange)
    if v.availability == "failures":
        return list(_failing(experiment, chips, until))
    if v.availability == "spare_capacity":
        return list(_scavenging(experiment, chips, until))
    return [JobPhase(0.0, State.STEPPING, 1.0, ((0, State.STEPPING, chips[0]),))]


class StandsStill(Exception):
    """The job can take no further step; the message says from when on."""


def ring_bytes(num_params: int, learners: int) -> float:
    """Bytes that each learner sends, and receives, in a step: a ring all-reduce of bfloat16 gradients."""
    return 2 * (learners - 1) / learners * _GRADIENT_BYTES * num_params


def exchange_seconds(experiment: Experiment, num_params: int) -> float:
    """Seconds of a step's exchange between learners, over the links of `virtual`; 0 for a lone learner.

    A ring goes at its slowest link, and each of its 2 (M - 1) hops takes the longest latency. A route through
    the syncer is not counted, in favour of data-parallel training.
    """
    v, learners = experiment.virtual, experiment.sync.num_learners
    if experiment.algorithm == "lone_learner" or learners == 1:
        return 0.0
    sending = ring_bytes(num_params, learners) / min(v.bandwidth) if v.bandwidth else 0.0
    return sending + 2 * (learners - 1) * max(v.latency)


class JobClock:
    """The job's virtual time: a step takes as long as for the slowest learner, at the speed of the phase.

    The exchange of gradients overlaps with the whole backward pass, as if the first gradient were there at
    its beginning; for what the exchange takes beyond it all chips wait for the network.
    """

    def __init__(self, experiment: Experiment, num_params: int, record: Callable[[Any], None]) -> None:
        self.now = 0.0
        self._exchange = exchange_seconds(experiment, num_params)
        self._phases = phases(experiment, self._exchange)
        times = step_times(experiment)
        self._times = times[:1] if experiment.algorithm == "lone_learner" else times
        self._record = record
        self._doing = State.STEPPING  # while the phase lets it step
        self._at = -1
        self._enter_phase()

    def step(self) -> None:
        """Advances by a step and its interruptions; raises StandsStill if the job stops for good before."""
        draws = [draw() for draw in self._times]
        # Chips whose learner's share is done wait for the slowest: on average for this part of the step.
        useful, slowest = sum(draws) / len(draws), max(draws)
        took = self._work(useful)
        if slowest > useful:
            self._show(State.WAITING_FOR_PEERS)
            took += self._work(slowest - useful)
            self._show(State.STEPPING)
        exposed = self._exchange - _BACKWARD_SHARE * took
        if exposed > 0:
            self._show(State.WAITING_FOR_NETWORK)
            self._work(exposed, by_chips=False)
            self._show(State.STEPPING)

    def finish(self) -> None:
        """Records that all chips are released."""
        for learner, _, chips in self._phases[self._at].states:
            self._record(records.StateChanged(learner, State.FINISHED, self.now, chips))

    def _work(self, seconds: float, by_chips: bool = True) -> float:
        """Advances by `seconds` of work at full speed; returns the time it took, less that of standing still.

        Unless `by_chips`, it takes the same time on any number of chips.
        """
        took = 0.0
        while seconds > 0:
            speed = self._phases[self._at].speed
            if speed and not by_chips:
                speed = 1.0
            if self._at + 1 == len(self._phases):
                if not speed:
                    raise StandsStill(f"the job stands still from {self.now:g} virtual seconds on")
                self.now += seconds / speed
                return took + seconds / speed
            left = self._phases[self._at + 1].time - self.now
            if left * speed >= seconds:
                self.now += seconds / speed
                return took + seconds / speed
            seconds -= left * speed
            took += left if speed else 0.0
            self._enter_phase()
        return took

    def _enter_phase(self) -> None:
        self._at += 1
        phase = self._phases[self._at]
        self.now = max(self.now, phase.time)
        for learner, state, chips in phase.states:
            shown = self._doing if state is State.STEPPING else state
            self._record(records.StateChanged(learner, shown, self.now, chips))

    def _show(self, state: State) -> None:
        self._doing = state
        for learner, usual, chips in self._phases[self._at].states:
            if usual is State.STEPPING:
                self._record(records.StateChanged(learner, state, self.now, chips))


def run_virtual_baseline(assembly: Assembly, record: Callable[[Any], None], stop: threading.Event) -> Outcome:
    """Trains one copy of the model in virtual time; an interrupted step costs time only.

    Runs `data_parallel`, `elastic_data_parallel` or `lone_learner` to the last step, or until the job stands
    still for good or `stop` is set.
    """
    e, arrays = assembly.experiment, JobArrays(assembly)
    arrays.begin()
    clock = JobClock(e, assembly.num_params, record)
    evaluations = Evaluations(arrays.scorer(), e.eval.every, record, clock=lambda: clock.now)

    def train(step: int) -> None:
        tokens, metrics = arrays.step(step - 1)
        jax.block_until_ready(metrics)
        done = records.StepDone(0, step, clock.now, tokens, metrics)
        arrays.tokens += done.tokens
        record(done)
        if step < e.train.steps and evaluations.due(step):  # the last one comes at the end
            evaluations.evaluate(step, arrays.tokens, arrays.params)

    evaluations.evaluate(0, arrays.tokens, arrays.params)
    step, failure = _play(clock, e.train.steps, stop, train)
    loss = evaluations.evaluate(step, arrays.tokens, arrays.params)
    return Outcome(arrays.parameters(), step, loss, step == e.train.steps, failure)


def run_without_arrays(
    experiment: Experiment, num_params: int, record: Callable[[Any], None], stop: threading.Event
) -> Outcome:
    """Simulates the job without arrays; all batches count as full."""
    clock = JobClock(experiment, num_params, record)
    shards = range(1 if experiment.algorithm == "lone_learner" else experiment.sync.num_learners)
    tokens = task_of(experiment).row_tokens * sum(experiment.batch_size(m) for m in shards)

    def count(step: int) -> None:
        record(records.StepDone(0, step, clock.now, tokens, {}))

    step, failure = _play(clock, experiment.train.steps, stop, count)
    return Outcome(None, step, None, finished=step == experiment.train.steps, failure=failure)


def _play(
    clock: JobClock, steps: int, stop: threading.Event, done: Callable[[int], None]
) -> tuple[int, str | None]:
    """Plays up to `steps` steps, calls `done` with each, and returns the last and why it stopped early."""
    step, failure = 0, None
    while step < steps and not stop.is_set() and failure is None:
        try:
            clock.step()
        except StandsStill as error:
            failure = str(error)
        else:
            step += 1
            done(step)
    clock.finish()
    return step, failure


def steps_within(experiment: Experiment, num_params: int, seconds: float) -> int:
    """Number of steps of the job in `seconds` of virtual time."""
    clock, steps = JobClock(experiment, num_params, lambda record: None), -1
    with contextlib.suppress(StandsStill):
        while clock.now <= seconds:
            steps += 1
            clock.step()
    return max(1, steps)


def _failing(experiment: Experiment, chips: Mapping[int, int], until: float) -> Iterator[JobPhase]:
    spares = tuple((job, State.STANDBY, chips[job]) for job in chips if job)
    fleet = sum(chips.values())  # spares included, which do no work
    for change in fleet_changes(experiment, until):
        if change.job:
            continue
        speed = change.chips / fleet if change.state is State.STEPPING else 0.0
        states = ((0, change.state, change.chips), *spares)
        yield JobPhase(change.time, change.state, speed, states)


def _scavenging(experiment: Experiment, chips: Mapping[int, int], until: float) -> Iterator[JobPhase]:
    """When chips are added or removed, all pause for `resize_seconds`; further changes wait that long."""
    v, learners = experiment.virtual, experiment.sync.num_learners
    sampled = draw_extra(v.spare_capacity, learners, experiment.seed, until)
    extra = v.spare_capacity.extra_learners
    free_at, taken = 0.0, -1
    for i, (time, count) in enumerate(sampled):
        begin = max(time, free_at)
        if i + 1 < len(sampled) and sampled[i + 1][0] <= begin:
            continue  # replaced by another change before it could take effect
        if count == taken:
            continue  # changes cancelled each other
        taken = count
        used = range(1, count + 1)

        def states(state: State, used: range = used) -> tuple[tuple[int, State, int], ...]:
            present = [(j, state if j in used else State.FINISHED, chips[j]) for j in range(1, extra + 1)]
            return ((0, state, chips[0]), *present)

        if i:
            yield JobPhase(begin, State.RECONFIGURING, 0.0, states(State.RECONFIGURING))
        free_at = begin + (v.resize_seconds if i else 0.0)
        yield JobPhase(free_at, State.STEPPING, 1.0 + count / learners, states(State.STEPPING))
