"""Virtual runs without arrays: the protocol, its times and its goodput, but no training."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddiloco.config import ConfigError
from ddiloco.observe import records
from ddiloco.runtime.experiment import BASELINES, Experiment
from ddiloco.runtime.outcome import Outcome
from ddiloco.runtime.virtual import RecordingObserver, play
from ddiloco.runtime.virtual_baseline import JobClock
from ddiloco.runtime.virtual_fleet import horizon, make_fleet
from ddiloco.virtual.fleet import Fleet
from ddiloco.virtual.ports import CountingLearner, CountingSyncer, Observer

Record = Callable[[Any], None]


def run_without_arrays(
    experiment: Experiment, sizes: Sequence[int], record: Record, stop: threading.Event
) -> Outcome:
    """Plays the run; batches count as full.

    Args:
      experiment: of the virtual driver.
      sizes: bytes of each fragment; of no use to a baseline.
      record: takes the records of the run.
      stop: ends it early.
    """
    if experiment.algorithm in BASELINES:
        return _play_job(experiment, record, stop)
    observer = RecordingObserver(record, lambda step, tokens, now: None)
    fleet = _counting_fleet(experiment, experiment.train.steps, sizes, observer)
    failure = play(fleet, experiment, observer, stop)
    return Outcome(None, fleet.syncer.durable.step, None, fleet.over, failure)


def rehearse(experiment: Experiment, tokens: int, sizes: Sequence[int]) -> int:
    """The global steps at which the fleet's learners have trained on so many tokens, without training.

    `sizes`: bytes of each fragment. Batches count as full, so that a run differs by what padding there is.

    Raises:
      ConfigError: the fleet dies before it comes there.
    """
    counted = _Counted()
    fleet = _counting_fleet(experiment, None, sizes, counted)
    until = horizon(experiment)
    fleet.run(stop=lambda: counted.tokens >= tokens or fleet.calendar.now > until)
    if counted.tokens < tokens:
        raise ConfigError(
            f"config.train.tokens: is {tokens}, but the fleet of config.virtual comes to {counted.tokens} "
            f"in {until:g} virtual seconds"
        )
    return counted.clock


class _Counted(Observer):
    def __init__(self) -> None:
        self.tokens = self.clock = 0

    def stepped(self, learner: int, clock: int, tokens: int, metrics: Mapping[str, Any], now: float) -> None:
        self.tokens += tokens
        self.clock = max(self.clock, clock)


def with_steps(experiment: Experiment, sizes: Callable[[], Sequence[int]]) -> Experiment:
    """The experiment with `train.steps` set by its token budget, if it has one.

    Under the virtual driver a rehearsal finds the steps; else all learners are taken to step alike.
    """
    tokens = experiment.train.tokens
    if tokens is None:
        return experiment
    length = experiment.data.sequence_length
    learners = range(1 if experiment.algorithm == "lone_learner" else experiment.sync.num_learners)
    steps = -(-tokens // (length * sum(experiment.batch_size(m) for m in learners)))
    if experiment.driver == "virtual" and experiment.algorithm not in BASELINES:
        steps = rehearse(experiment, tokens, sizes())
    return dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, steps=steps))


def _counting_fleet(
    experiment: Experiment, total_steps: int | None, sizes: Sequence[int], observer: Observer
) -> Fleet:
    length = experiment.data.sequence_length

    def arrays(learner: int) -> CountingLearner:
        return CountingLearner(experiment.batch_size(learner) * length)

    return make_fleet(experiment, total_steps, arrays, CountingSyncer(sizes), observer)


def _play_job(experiment: Experiment, record: Record, stop: threading.Event) -> Outcome:
    clock = JobClock(experiment, record)
    shards = range(1 if experiment.algorithm == "lone_learner" else experiment.sync.num_learners)
    tokens = experiment.data.sequence_length * sum(experiment.batch_size(m) for m in shards)
    step = 0
    while step < experiment.train.steps and not stop.is_set():
        step += 1
        clock.step()
        record(records.StepDone(0, step, clock.now, tokens, {}))
    clock.finish()
    return Outcome(None, step, None, finished=step == experiment.train.steps, failure=None)
