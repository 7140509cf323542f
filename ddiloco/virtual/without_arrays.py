"""Virtual runs without arrays: the protocol, its times and its goodput, but no training."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ddiloco.config import ConfigError
from ddiloco.outer.encoding import Traffic
from ddiloco.roles.outcome import Outcome
from ddiloco.settings.experiment import Experiment, task_of
from ddiloco.virtual.fleet import Fleet
from ddiloco.virtual.from_settings import horizon, make_fleet
from ddiloco.virtual.ports import CountingLearner, CountingSyncer, Observer
from ddiloco.virtual.run import RecordingObserver, play

Record = Callable[[Any], None]


def run_without_arrays(
    experiment: Experiment, traffic: Traffic, record: Record, stop: threading.Event
) -> Outcome:
    """Plays the run; batches count as full."""
    observer = RecordingObserver(record, merged=lambda step: None)
    fleet = _counting_fleet(experiment, experiment.train.steps, CountingSyncer(traffic), observer)
    failure = play(fleet, experiment, observer, stop)
    return Outcome(None, fleet.syncer.durable.step, None, fleet.over, failure)


def rehearse(experiment: Experiment, traffic: Traffic) -> int:
    """How many global steps the fleet takes within its budget of tokens or of time; nothing is trained.

    `traffic`: bytes of each fragment. Batches count as full; a real run differs by its padding.

    Raises:
      ConfigError: the fleet dies before it has spent its tokens.
    """
    counted = _Counted()
    fleet = _counting_fleet(experiment, None, CountingSyncer(traffic), counted)
    tokens, until = experiment.train.tokens, experiment.virtual.seconds or horizon(experiment)
    spent = math.inf if tokens is None else tokens
    fleet.run(stop=lambda: counted.tokens >= spent or fleet.calendar.now > until)
    if tokens is not None and counted.tokens < tokens:
        raise ConfigError(
            f"config.train.tokens: is {tokens}, but the fleet of config.virtual comes to {counted.tokens} "
            f"in {until:g} virtual seconds"
        )
    return max(1, counted.clock)


class _Counted(Observer):
    def __init__(self) -> None:
        self.tokens = self.clock = 0

    def stepped(self, learner: int, clock: int, tokens: int, metrics: Mapping[str, Any], now: float) -> None:
        self.tokens += tokens
        self.clock = max(self.clock, clock)


def _counting_fleet(
    experiment: Experiment, total_steps: int | None, syncer: CountingSyncer, observer: Observer
) -> Fleet:
    length = task_of(experiment).row_tokens

    def arrays(learner: int) -> CountingLearner:
        return CountingLearner(experiment.batch_size(learner) * length)

    return make_fleet(experiment, total_steps, arrays, syncer, observer)
