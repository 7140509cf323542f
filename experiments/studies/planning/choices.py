"""Settings of synchronisation to choose from, each played on the same fleet."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ddiloco.outer.codecs import CODECS
from ddiloco.outer.encoding import Traffic, traffic
from ddiloco.outer.fragments import FragmentLayout
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.settings.experiment import BY_LEARNER, Experiment
from ddiloco.telemetry.loss_estimate import ERROR, loss_percent
from ddiloco.virtual.run import RecordingObserver, counting_fleet, play
from experiments.studies.replay.outcomes import FleetOutcome, outcome_of
from experiments.studies.replay.what_if import RecordedFleet

INTERVALS = (6, 12, 24, 48, 96)
NARROW = "int4"  # the codec of the fewest bytes that costs no loss
MAX_STEPS = 4000  # of all learners, in one play
TURNS = 6  # rounds of each fragment by the run's interval, at least where there are steps
MARGIN = ERROR / 2  # percent of loss by which another choice is better, or it is not worth a change


@dataclasses.dataclass(frozen=True)
class Choice:
    """Settings that are played."""

    interval: int
    codec: str
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
        return loss_percent(o.work, o.age, o.share, self.choice.codec)


Fleet = Callable[..., FleetOutcome]
"""Plays a choice; `without` some learners, or with `narrow` ones that alone send in NARROW."""


def choices(experiment: Experiment) -> list[Choice]:
    """A dozen choices, the run's own first; where learners wait, K and the run-ahead bound stay."""
    own = Choice.of(experiment)
    bound = experiment.sync.max_run_ahead or 0
    intervals = [h for h in INTERVALS if h > bound]
    found = [own]
    for codec in dict.fromkeys((own.codec, NARROW)):
        found += [dataclasses.replace(own, interval=h, codec=codec) for h in intervals]
    if own.quorum is not None and experiment.sync.num_learners > 1:
        found.append(dataclasses.replace(own, quorum=max(2, experiment.sync.num_learners // 2)))
    found.append(dataclasses.replace(own, overlap=2 * max(1, own.overlap)))
    return list(dict.fromkeys(found))


def steps_to_play(experiment: Experiment) -> int:
    """Steps of a learner in one play: as many as take seconds, and some turns at least."""
    most = max(TURNS * max(experiment.sync.interval, 24), MAX_STEPS // experiment.sync.num_learners)
    return min(experiment.train.steps, most)


def of_record(recorded: RecordedFleet, experiment: Experiment, layout: FragmentLayout) -> Fleet:
    """The fleet of a recorded run."""
    steps = steps_to_play(experiment)

    def played(choice: Choice, without: Collection[int] = (), narrow: Collection[int] = ()) -> FleetOutcome:
        sizes = sizes_of(layout, experiment.outer, choice.codec)
        fewer = sum(sizes.offer) / sum(sizes_of(layout, experiment.outer, NARROW).offer)
        policy = _of_fewer(choice.policy(experiment.sync), len(without))
        return recorded.play(policy, steps, sizes, without, dict.fromkeys(narrow, fewer))

    return played


def of_config(experiment: Experiment, layout: FragmentLayout) -> Fleet:
    """The fleet of a virtual run's settings."""
    steps = steps_to_play(experiment)

    def played(choice: Choice, without: Collection[int] = (), narrow: Collection[int] = ()) -> FleetOutcome:
        sizes = sizes_of(layout, experiment.outer, choice.codec)
        fewer = sum(sizes.offer) / sum(sizes_of(layout, experiment.outer, NARROW).offer)
        e = _of_some(experiment, choice, without, dict.fromkeys(narrow, fewer), steps)
        recorded: list[Any] = []
        observer = RecordingObserver(recorded.append)
        play(counting_fleet(e, steps, sizes, observer), e, observer, threading.Event())
        return outcome_of(recorded, e.sync.num_fragments)

    return played


def sizes_of(layout: FragmentLayout, outer: OuterConfig, codec: str) -> Traffic:
    """Bytes of fragments in a codec of offers."""
    feedback = outer.error_feedback and not CODECS[codec].exact
    return traffic(layout, dataclasses.replace(outer, codec=codec, error_feedback=feedback))


def _of_fewer(policy: SyncPolicy, fewer: int) -> SyncPolicy:
    learners = policy.num_learners - fewer
    quorum = None if policy.quorum is None else min(policy.quorum, learners)
    return dataclasses.replace(policy, num_learners=learners, quorum=quorum)


def _of_some(
    experiment: Experiment,
    choice: Choice,
    without: Collection[int],
    faster: Mapping[int, float],
    steps: int,
) -> Experiment:
    """The experiment of a choice, without some learners, and with some links that carry more."""
    v, every = experiment.virtual, range(experiment.sync.num_learners)
    kept = [m for m in every if m not in without]
    given = {name: getattr(v, name) for name in BY_LEARNER}
    each = {name: [v.of(name, m) for m in kept] for name, values in given.items() if values}
    if faster and "bandwidth" in each:
        each["bandwidth"] = [b * faster.get(m, 1.0) for m, b in zip(kept, each["bandwidth"], strict=True)]
    policy = _of_fewer(choice.policy(experiment.sync), len(without))
    rows = experiment.train.batch_sizes and tuple(experiment.train.batch_sizes[m] for m in kept)
    return dataclasses.replace(
        experiment,
        sync=policy,
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
