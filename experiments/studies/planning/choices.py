"""Settings of synchronisation to choose from, each played on the same fleet."""

from __future__ import annotations

import dataclasses
import statistics
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from ddiloco.outer.encoding import traffic
from ddiloco.outer.fragments import FragmentLayout
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.settings.experiment import BY_LEARNER, Experiment
from ddiloco.telemetry.loss_estimate import ERROR, loss_percent
from ddiloco.virtual.run import RecordingObserver, counting_fleet, play
from experiments.studies.replay.outcomes import FleetOutcome, outcome_of
from experiments.studies.replay.what_if import MeasuredFleet

INTERVALS = (6, 12, 24, 48, 96)
NARROW = "int4"  # the codec of the fewest bytes that costs no loss
MAX_STEPS = 4000  # of all learners, in one play
TURNS = 6  # rounds of each fragment by the run's interval, at least where there are steps
MARGIN = ERROR / 2  # percent of loss by which another choice is better, or it is not worth a change


@dataclasses.dataclass(frozen=True)
class Choice:
    """Settings that are played."""

    interval: int
    codec: str | tuple[str, ...]
    quorum: int | None
    overlap: int

    @classmethod
    def of(cls, experiment: Experiment) -> Choice:
        """The settings of a run."""
        sync = experiment.sync
        return cls(sync.interval, experiment.outer.codec, sync.quorum, sync.overlap)

    @property
    def settings(self) -> dict[str, Any]:
        """By their paths in the config."""
        paths = ("sync.interval", "outer.codec", "sync.quorum", "sync.overlap")
        return dict(zip(paths, dataclasses.astuple(self), strict=True))

    @property
    def flags(self) -> dict[str, str]:
        """By path, the setting as on a command line."""
        several = {path: ",".join(v) for path, v in self.settings.items() if isinstance(v, tuple)}
        return {path: str(value) for path, value in (self.settings | several).items()}

    @property
    def codecs(self) -> tuple[str, ...]:
        """By learner; those beyond send in the last."""
        return (self.codec,) if isinstance(self.codec, str) else self.codec

    def codec_of(self, learner: int) -> str:
        """The codec of the learner's offers."""
        return self.codecs[min(learner, len(self.codecs) - 1)]

    def narrowed(self, learner: int, learners: int) -> Choice:
        """The same with NARROW for this one of so many learners alone."""
        each = (NARROW if m == learner else self.codec_of(m) for m in range(learners))
        return dataclasses.replace(self, codec=tuple(each))

    def policy(self, sync: SyncPolicy) -> SyncPolicy:
        """The run's policy with these settings."""
        return dataclasses.replace(sync, interval=self.interval, quorum=self.quorum, overlap=self.overlap)


@dataclasses.dataclass(frozen=True)
class Played:
    """A choice with its outcome."""

    choice: Choice
    outcome: FleetOutcome

    @property
    def loss(self) -> float:
        """The estimate of `loss_percent`."""
        o = self.outcome
        return statistics.fmean(loss_percent(o.work, o.age, o.share, name) for name in self.choice.codecs)


Fleet = Callable[..., FleetOutcome]
"""Plays a choice; `without` some learners."""


def choices(experiment: Experiment) -> list[Choice]:
    """A dozen choices, the run's own first; where learners wait, K and the run-ahead bound stay."""
    own = Choice.of(experiment)
    bound = experiment.sync.max_run_ahead or 0
    intervals = [h for h in INTERVALS if h > bound]
    found = [own]
    for codec in dict.fromkeys([own.codec, NARROW]):
        found += [dataclasses.replace(own, interval=h, codec=codec) for h in intervals]
    if own.quorum is not None and experiment.sync.num_learners > 1:
        found.append(dataclasses.replace(own, quorum=max(2, experiment.sync.num_learners // 2)))
    found.append(dataclasses.replace(own, overlap=2 * max(1, own.overlap)))
    return list(dict.fromkeys(found))


def steps_to_play(experiment: Experiment) -> int:
    """Steps of a learner in one play: as many as take seconds, and some turns at least."""
    most = max(TURNS * max(experiment.sync.interval, 24), MAX_STEPS // experiment.sync.num_learners)
    return min(experiment.train.steps, most)


def of_record(measured: MeasuredFleet, experiment: Experiment, layout: FragmentLayout) -> Fleet:
    """The fleet of a run that was measured."""
    steps = steps_to_play(experiment)

    def played(choice: Choice, without: Collection[int] = ()) -> FleetOutcome:
        policy = _of_fewer(choice.policy(experiment.sync), len(without))
        return measured.play(policy, steps, traffic(layout, _outer(experiment, choice.codec)), without)

    return played


def of_config(experiment: Experiment, layout: FragmentLayout) -> Fleet:
    """The fleet of a virtual run's settings."""
    steps = steps_to_play(experiment)

    def played(choice: Choice, without: Collection[int] = ()) -> FleetOutcome:
        e = _of_some(experiment, choice, without, steps)
        recorded: list[Any] = []
        observer = RecordingObserver(recorded.append)
        play(counting_fleet(e, steps, traffic(layout, e.outer), observer), e, observer, threading.Event())
        return outcome_of(recorded, e.sync.num_fragments)

    return played


def _outer(experiment: Experiment, codec: str | tuple[str, ...]) -> OuterConfig:
    return dataclasses.replace(experiment.outer, codec=codec, error_feedback=False)  # which adds no bytes


def _of_fewer(policy: SyncPolicy, fewer: int) -> SyncPolicy:
    learners = policy.num_learners - fewer
    quorum = None if policy.quorum is None else min(policy.quorum, learners)
    return dataclasses.replace(policy, num_learners=learners, quorum=quorum)


def _of_some(experiment: Experiment, choice: Choice, without: Collection[int], steps: int) -> Experiment:
    """The experiment of a choice, without some learners."""
    v, every = experiment.virtual, range(experiment.sync.num_learners)
    kept = [m for m in every if m not in without]
    given = {name: getattr(v, name) for name in BY_LEARNER}
    each = {name: [v.of(name, m) for m in kept] for name, values in given.items() if values}
    policy = _of_fewer(choice.policy(experiment.sync), len(without))
    rows = experiment.train.batch_sizes and tuple(experiment.train.batch_sizes[m] for m in kept)
    return dataclasses.replace(
        experiment,
        sync=policy,
        outer=_outer(experiment, tuple(choice.codec_of(m) for m in kept)),
        virtual=dataclasses.replace(v, **{name: tuple(values) for name, values in each.items()}),
        train=dataclasses.replace(experiment.train, steps=steps, tokens=None, batch_sizes=rows),
    )


def best(played: Sequence[Played]) -> Played:
    """The choice with the least estimated loss, unless the first, which is the run's, is nearly as good.

    Of choices as good as the least and of nearly as few bytes as any of these, the one nearest to the run's.
    One by which a learner has less than half of what the worst one has now merged is not taken: the estimate
    hardly counts a learner's work.
    """
    in_vain = played[0].outcome.worst / 2
    played = [played[0], *(one for one in played[1:] if one.outcome.worst >= in_vain)]
    least = min(one.loss for one in played)
    if played[0].loss <= least + MARGIN:
        return played[0]
    near = [one for one in played if one.loss <= least + MARGIN / 2]
    fewest = min(one.outcome.bytes_sent for one in near)
    own = played[0].choice.settings.items()
    cheap = [one for one in near if one.outcome.bytes_sent <= 1.1 * fewest]
    return min(cheap, key=lambda one: (len(one.choice.settings.items() - own), one.loss))


def play_all(fleet: Fleet, found: Iterable[Choice]) -> list[Played]:
    """Each of the choices, played."""
    return [Played(choice, fleet(choice)) for choice in found]
