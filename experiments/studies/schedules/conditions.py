"""How bad conditions are: delays, losses, speeds; and a fleet without arrays that lives in them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence

from ddiloco.outer.encoding import InvalidContribution, Traffic
from ddiloco.outer.global_model import NextVersion
from ddiloco.protocol.messages import Contribution
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.virtual.array_ports import CountingSyncer, Observer
from ddiloco.virtual.fleet import Durations, Fleet, VirtualSyncer
from ddiloco.virtual.learner_process import VirtualLearner, VirtualPlace
from ddiloco.virtual.links import Link, LinkQuality
from experiments.studies.schedules.integers import IntegerLearner, Parameters, Pieces


@dataclasses.dataclass(frozen=True)
class Weather:
    """Times are in virtual seconds; an inner step takes about one."""

    delay: float = 0.2  # mean of a message's exponential delay; independent delays reorder messages
    far: float = 0.0  # learners' links take U(0, far) more, always
    loss: float = 0.0  # share of messages that vanish
    duplicates: float = 0.0  # share of messages that come twice
    unsound: float = 0.0  # share of offers that prove unsound
    refused: float = 0.0  # share of offers that are left out of their merge
    refuses_all: bool = False  # every offer is, to the end of the run
    skipped: float = 0.0  # share of steps that change nothing
    speed_spread: float = 0.3  # learners' mean step times are 1 + U(0, spread)
    jitter: float = 0.1  # a step takes up to this share longer than the mean
    merge_time: float = 0.1  # mean, exponential

    def link(self, latency: float = 0.0) -> LinkQuality:
        """One direction of a link."""
        return LinkQuality(latency, jitter=self.delay, loss=self.loss, duplicates=self.duplicates)


class _Doubtful(CountingSyncer):
    """Finds some fragments unsound, and leaves others out of their merges, which add the rest.

    Attributes:
      versions: every version that was ever made, by fragment, number and lineage.
      given: the offers to the last merge.
      shards: the syncer's processes, whose disks say which versions are the newest.
    """

    def __init__(self, rng: random.Random, weather: Weather, num_fragments: int) -> None:
        nothing = (0,) * num_fragments
        super().__init__(Traffic(nothing, (nothing,), nothing))
        self.unsound, self.refused, self._refuses_all = weather.unsound, weather.refused, weather.refuses_all
        self._rng = rng
        self.versions = {(p, 0, 0): 0 for p in range(num_fragments)}
        self.given: dict[Contribution, Pieces] = {}
        self.shards: Sequence[VirtualSyncer] = ()

    def fragment(self, fragment: int) -> Pieces:
        """The newest version on the disk."""
        if not self.shards:  # which are about to start
            return (0,)
        durable = self._shard(fragment).durable
        return (self.versions[fragment, durable.versions[fragment], durable.lineages[fragment]],)

    def _shard(self, fragment: int) -> VirtualSyncer:
        return self.shards[fragment % len(self.shards)]

    def received(self, fragment: int, payload: Pieces, learner: int) -> Pieces:
        """Finds a random share of the fragments unsound."""
        if self.unsound and self._rng.random() < self.unsound:
            raise InvalidContribution("not finite")
        return payload

    def merge(
        self, fragment: int, given: Sequence[tuple[Contribution, Pieces]], interval: int | None
    ) -> NextVersion:
        """Leaves a random share of the offers out; the next version is the last less what is left."""
        learners = [c.learner for c, _ in given] if self.refused or self._refuses_all else []
        left_out = tuple(m for m in learners if self._refuses_all or self._rng.random() < self.refused)
        self.given, [last] = dict(given), self.fragment(fragment)
        if given and len(left_out) == len(given):
            return NextVersion((last,), {}, left_out, empty=True)
        new = last - sum(gradient for c, (gradient,) in given if c.learner not in left_out)
        shard = self._shard(fragment)
        self.versions[fragment, shard.durable.versions[fragment] + 1, shard.lineage] = new
        return NextVersion((new,), {}, left_out)


class WeatheredFleet(Fleet):
    """A fleet of counting learners in a weather; none has joined yet."""

    def __init__(
        self,
        policy: SyncPolicy,
        total_steps: int | None,
        rng: random.Random,
        weather: Weather | None = None,
        *,
        learners: int | None = None,
        observer: Observer | None = None,
        shards: int = 1,
        checkpoint_every: int | None = None,
    ) -> None:
        """`learners`: how many places there are; None: the policy's M. `shards`: of the syncer."""
        self.weather = weather = weather or Weather()
        self._doubtful = _Doubtful(rng, weather, policy.num_fragments)
        self._rng = rng
        self._retired: set[int] = set()
        moves = random.Random(1)  # of its own, so that the rest of a schedule does not depend on it
        places = {m: self._place(checkpoint_every) for m in range(learners or policy.num_learners)}
        super().__init__(
            policy,
            total_steps,
            places,
            lambda learner: IntegerLearner(lambda: rng.randint(1, 100), self._skips, moves),
            self._doubtful,
            takes=Durations(lambda: rng.expovariate(1 / weather.merge_time)),
            observer=observer,
            shards=shards,
        )
        self._doubtful.shards = self.syncers

    @property
    def given(self) -> Mapping[Contribution, Pieces]:
        """The offers to the last merge."""
        return self._doubtful.given

    def parameters(self, learner: VirtualLearner) -> Parameters:
        """Of a learner's process."""
        return learner.arrays.parameters(self._doubtful.versions)

    def retire(self, learner: int) -> None:
        """The learner leaves; whoever starts a process of it sees that sent away."""
        self._retired.add(learner)
        self.leave(learner)

    def join(self, learner: int) -> VirtualLearner:
        """As a Fleet's; one that was retired leaves at once. Its disk may have lost the newest, or all."""
        place = self.places[learner]
        if place.checkpoints:
            place.checkpoints = self._rng.choice([*[place.checkpoints] * 3, place.checkpoints[:1], []])
        process = super().join(learner)
        if learner in self._retired:
            self.leave(learner)
        return process

    def calm(self) -> None:
        """From now on messages are only delayed: none is lost, doubled or unsound, no learner cut off."""
        self._doubtful.unsound = self._doubtful.refused = 0.0
        for place in self.places.values():
            for link in (place.up, place.down):
                link.cut.clear()
                link.quality = dataclasses.replace(link.quality, loss=0.0, duplicates=0.0)

    def _skips(self) -> bool:
        return bool(self.weather.skipped) and self._rng.random() < self.weather.skipped

    def _place(self, checkpoint_every: int | None) -> VirtualPlace:
        weather, rng = self.weather, self._rng
        mean = 1 + rng.random() * weather.speed_spread
        latency = rng.random() * weather.far if weather.far else 0.0
        links = (Link(weather.link(latency), rng), Link(weather.link(latency), rng))
        step_time = lambda: mean * (1 + weather.jitter * rng.random())  # noqa: E731
        return VirtualPlace(step_time, *links, checkpoint_every=checkpoint_every)
