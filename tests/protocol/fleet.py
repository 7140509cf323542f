"""A fleet of protocol cores in virtual time: random speeds, delays, losses, crashes; with checks."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random

from ddiloco.protocol import actions, events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.schedule import Schedule
from ddiloco.protocol.syncer import SyncerCore


@dataclasses.dataclass
class Weather:
    """How bad things are; times in virtual seconds, an inner step takes about one."""

    delay: float = 0.2  # mean of a message's exponential delay; independent delays reorder messages
    loss: float = 0.0  # share of messages that vanish (never those of a join, which are retried)
    speed_spread: float = 0.3  # learners' mean step times are 1 + U(0, spread)
    jitter: float = 0.1
    merge_time: float = 0.1
    unsound: float = 0.0  # share of pulled fragments that prove unsound
    duplicates: float = 0.0  # share of messages that come twice


class Learner:
    """One incarnation: a core, a shelf of published fragments, and the ledger of its own steps."""

    def __init__(self, core: LearnerCore, step_time: float) -> None:
        self.core = core
        self.step_time = step_time
        self.alive = True
        self.frozen_until = 0.0
        self.stepping = False
        self.beating = False
        self.waited = 0
        self.own_steps = 0
        self.tokens_of_step: list[int] = []
        self.shelf: dict[int, actions.Publish] = {}
        self.spans: dict[tuple[int, int, int], tuple[int, int]] = {}  # (fragment, version, step) -> own steps


class Fleet:
    """Runs learners and a syncer until the syncer finishes or the event budget is spent."""

    def __init__(
        self, policy: SyncPolicy, total_steps: int, seed: int, weather: Weather | None = None
    ) -> None:
        self.policy, self.total_steps = policy, total_steps
        self.rng = random.Random(seed)
        self.weather = weather or Weather()
        self.now = 0.0
        self.syncer = SyncerCore(policy, total_steps)
        self.learners: dict[tuple[int, int], Learner] = {}
        self.records: list[actions.Record] = []
        self.drops: list[actions.Drop] = []
        self.merges: list[actions.Merge] = []
        self.merge_times: list[float] = []
        self.finished_at: float | None = None
        self._queue: list = []
        self._order = itertools.count()
        self._claimed: dict[tuple[int, int, int], int] = {}
        self._timeout_at: float | None = None

    # Scheduling.

    def after(self, delay: float, call, *arguments) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._order), call, arguments))

    def send(self, call, *arguments, reliable: bool = False) -> None:
        if reliable or self.rng.random() >= self.weather.loss:
            self.after(self.rng.expovariate(1 / self.weather.delay), call, *arguments)
        if self.weather.duplicates and self.rng.random() < self.weather.duplicates:
            self.after(self.rng.expovariate(1 / self.weather.delay), call, *arguments)

    def run(self, max_events: int = 200_000) -> None:
        for _ in range(max_events):
            if not self._queue or self.finished_at is not None:
                return
            self.now, _, call, arguments = heapq.heappop(self._queue)
            call(*arguments)
        raise AssertionError("the run did not end within its event budget")

    # Life of learners.

    def join(self, number: int, incarnation: int = 1, step_time: float | None = None) -> None:
        mean = step_time or 1 + self.rng.random() * self.weather.speed_spread
        core = LearnerCore(number, incarnation, self.policy, self.total_steps)
        self.learners[number, incarnation] = Learner(core, mean)
        self.send(self.to_syncer, events.LearnerJoined(number, incarnation), reliable=True)

    def crash(self, number: int, incarnation: int, noticed_after: float = 2.0) -> None:
        learner = self.learners.get((number, incarnation))
        if learner is not None and learner.alive:
            learner.alive = False
            lost = events.LearnerLost(number, incarnation, "crash")
            self.after(noticed_after, self.to_syncer, lost)

    def freeze(self, number: int, incarnation: int, seconds: float) -> None:
        learner = self.learners.get((number, incarnation))
        if learner is not None:
            learner.frozen_until = self.now + seconds

    def to_learner(self, key: tuple[int, int], event) -> None:
        learner = self.learners[key]
        if not learner.alive:
            return
        if self.now < learner.frozen_until:
            self.after(learner.frozen_until - self.now, self.to_learner, key, event)
            return
        for action in learner.core.handle(event, self.now):
            self._do_for_learner(learner, action)
        self._start_step(key, learner)
        self._keep_beating(key, learner)

    def _keep_beating(self, key: tuple[int, int], learner: Learner) -> None:
        if learner.core.recovered and not learner.stepping and not learner.beating:
            learner.beating = True
            self.after(self.policy.heartbeat, self._beat, key)

    def _beat(self, key: tuple[int, int]) -> None:
        self.learners[key].beating = False
        if not self.learners[key].stepping:
            self.to_learner(key, events.Heartbeat())

    def _start_step(self, key: tuple[int, int], learner: Learner) -> None:
        core = learner.core
        if learner.stepping or not core.recovered or core.done or not learner.alive:
            return
        if core.blocked:
            learner.waited += 1
            return
        learner.stepping = True
        tokens = self.rng.randint(1, 100)
        learner.own_steps += 1
        learner.tokens_of_step.append(tokens)
        for action in core.handle(events.StepStarted(tokens), self.now):
            self._do_for_learner(learner, action)
        duration = learner.step_time * (1 + self.weather.jitter * self.rng.random())
        self.after(duration, self._finish_step, key)

    def _finish_step(self, key: tuple[int, int]) -> None:
        self.learners[key].stepping = False
        self.to_learner(key, events.StepFinished())

    def _do_for_learner(self, learner: Learner, action) -> None:
        core = learner.core
        match action:
            case actions.AdoptAll(step=step, versions=versions):
                ready = events.LearnerReady(core.learner, core.incarnation, step, versions)
                self.after(0.0, self.to_syncer, ready)
            case actions.TakeSnapshot(contribution=c):
                learner.spans[c.fragment, c.version, c.step] = (
                    learner.own_steps - c.steps,
                    learner.own_steps,
                )
                assert c.tokens == sum(learner.tokens_of_step[learner.own_steps - c.steps :])
            case actions.Publish(contribution=c):
                learner.shelf[c.fragment] = action
            case actions.SendReport(report=report):
                self.send(self.to_syncer, events.StepReported(report))
            case actions.Drop():
                self.drops.append(action)

    # The syncer.

    def to_syncer(self, event) -> None:
        for action in self.syncer.handle(event, self.now):
            self._do_for_syncer(action)
        deadline = self.syncer.next_deadline()
        assert deadline is None or deadline > self.now, "a deadline that has come is acted on at once"
        if deadline is not None and (self._timeout_at is None or deadline < self._timeout_at):
            self._timeout_at = max(deadline, self.now)
            self.after(self._timeout_at - self.now, self._fire_timeout)

    def _fire_timeout(self) -> None:
        self._timeout_at = None
        self.to_syncer(events.Timeout())

    def _do_for_syncer(self, action) -> None:
        match action:
            case actions.Welcome():
                key = (action.learner, action.incarnation)
                told = (action.incarnation, action.step, action.versions, action.merged_steps)
                welcomed = events.Welcomed(*told)
                self.send(self.to_learner, key, welcomed, reliable=True)
            case actions.SetClock():
                for key in action.receivers:
                    self.send(self.to_learner, key, events.ClockSet(action.step))
            case actions.PullFragment():
                self.send(self._answer_pull, action)
            case actions.Merge():
                self._check_merge(action)
                merge_time = self.rng.expovariate(1 / self.weather.merge_time)
                self.after(merge_time, self.to_syncer, events.MergeFinished(action.round))
            case actions.Broadcast():
                update = events.UpdateArrived(action.fragment, action.version, action.step)
                for key in action.receivers:
                    self.send(self.to_learner, key, update)
            case actions.Drop():
                self.drops.append(action)
            case actions.Record():
                self.records.append(action)
            case actions.Finish():
                self.finished_at = self.now

    def _answer_pull(self, pull: actions.PullFragment) -> None:
        learner = self.learners[pull.learner, pull.incarnation]
        if not learner.alive or self.now < learner.frozen_until:
            return
        published = learner.shelf.get(pull.round.fragment)
        if published is None or self.rng.random() < self.weather.unsound:
            reply = events.PullFailed(pull.round, pull.learner, pull.incarnation, "nothing sound to pull")
        else:
            reply = events.FragmentArrived(pull.round, published.contribution)
        self.send(self.to_syncer, reply)

    def _check_merge(self, merge: actions.Merge) -> None:
        fragment = merge.round.fragment
        earlier = [m for m in self.merges if m.round.fragment == fragment]
        assert merge.version == len(earlier) + 1, "versions rise by one"
        assert all(m.round.step < merge.round.step for m in earlier), "rounds of a fragment come in order"
        assert Schedule(self.policy.num_fragments, self.policy.interval).last_due(
            fragment, merge.round.step
        ) == (merge.round.step)
        assert len(merge.contributions) >= (self.policy.quorum or 1), "a merge has its quorum"
        assert len({c.learner for c in merge.contributions}) == len(merge.contributions)
        for c in merge.contributions:
            assert c.fragment == fragment and c.version == merge.version - 1
            first, last = self.learners[c.learner, c.incarnation].spans[fragment, c.version, c.step]
            assert last - first == c.steps > 0
            key = (c.learner, c.incarnation, fragment)
            assert first >= self._claimed.get(key, 0), "no learner's tokens are merged twice"
            self._claimed[key] = last
        self.merges.append(merge)
        self.merge_times.append(self.now)

    # Questions.

    def count(self, name: str) -> int:
        return sum(record.name == name for record in self.records)

    def times_merged(self, fragment: int) -> int:
        return sum(merge.round.fragment == fragment for merge in self.merges)
