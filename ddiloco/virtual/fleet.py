"""A whole fleet in virtual time: learners' processes and the syncer's, and the links between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from ddiloco.goodput.accounting import State
from ddiloco.protocol import events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.virtual.array_ports import LearnerArrays, Observer, Payload, SyncerArrays
from ddiloco.virtual.availability import PAUSES, Change
from ddiloco.virtual.calendar import Calendar
from ddiloco.virtual.learner_process import VirtualLearner, VirtualPlace
from ddiloco.virtual.links import Link
from ddiloco.virtual.syncer_process import VirtualSyncer

INCARNATIONS_EACH = 1000  # between processes: more than one process ever rejoins
NOTICED = 5.0  # seconds until a learner notices that it is cut off


@dataclasses.dataclass(frozen=True)
class Durations:
    """Durations of processes that are not simulated, in virtual seconds."""

    merge: Callable[[], float] = lambda: 0.0
    notice_seconds: float = 0.0  # until the syncer detects a death
    recovery_seconds: float = 0.0  # from a learner's start until it asks to join


_NONE = Durations()


class Fleet:
    """Runs the protocol's cores under one simulated clock; the same inputs always give the same run.

    Each learner has a place, and there one process at a time (more only where an old one lingers).
    """

    def __init__(
        self,
        policy: SyncPolicy,
        total_steps: int | None,
        places: Mapping[int, VirtualPlace],
        learner_arrays: Callable[[int], LearnerArrays],
        syncer_arrays: SyncerArrays,
        *,
        takes: Durations = _NONE,
        observer: Observer | None = None,
        make_syncer: Callable[..., VirtualSyncer] = VirtualSyncer,
        shards: int = 1,
    ) -> None:
        """`takes`: durations of what is not simulated.

        `shards`: processes of the syncer, each with fragments of its own.
        """
        self.calendar = Calendar()
        self.policy, self.total_steps = policy, total_steps
        self.places = places
        self.takes, self.observer = takes, observer or Observer()
        self.processes: dict[int, VirtualLearner] = {}  # the newest of each learner
        self.shards = shards
        self._learner_arrays = learner_arrays
        self._routes: dict[tuple[int, int, int], VirtualLearner] = {}  # by shard, learner and incarnation
        self.syncers: list[VirtualSyncer] = []
        for shard in range(shards):
            self.syncers.append(make_syncer(self, syncer_arrays, shard))

    @property
    def syncer(self) -> VirtualSyncer:
        """The first shard of the syncer, in most fleets the only one."""
        return self.syncers[0]

    @property
    def over(self) -> bool:
        """Whether all shards of the syncer have finished; finished ones serve until then."""
        return all(syncer.finished_at is not None for syncer in self.syncers)

    def run(self, stop: Callable[[], bool] = lambda: False, max_events: int | None = None) -> None:
        """Lets time pass until the run is over, the calendar is empty, or `stop` returns True.

        Raises:
          TimeoutError: it was not over after `max_events`.
        """
        last = None if max_events is None else self.calendar.happened + max_events
        while not self.over and not stop() and self.calendar.advance():
            if last is not None and self.calendar.happened >= last:
                raise TimeoutError(f"the run is not over after {max_events} events")

    def schedule(self, changes: Iterable[Change]) -> None:
        """Schedules changes of learners; those without a `join` start at time 0."""
        changes = list(changes)
        first = {change.learner: change.event for change in reversed(changes)}
        for learner in self.places:
            if first.get(learner) != "join":
                self.calendar.at(0.0, self.join, learner)
        for change in changes:
            self.calendar.at(change.time, self._apply_change, change)

    # What happens to learners.

    def join(self, learner: int) -> VirtualLearner:
        """Starts a process of the learner, under the next incarnation; a living old one lingers.

        It resumes the newest checkpoint at its place, if any.
        """
        place = self.places[learner]
        incarnation = 1 + INCARNATIONS_EACH * place.starts
        place.starts += 1
        core = LearnerCore(learner, incarnation, self.policy, self.total_steps, self.shards)
        arrays = self._learner_arrays(learner)
        process = VirtualLearner(core, place, arrays, self.calendar, self.observer, self._send)
        self.processes[learner] = process
        newest = place.checkpoints[-1] if place.checkpoints else None
        merged = [syncer.furthest(learner) for syncer in self.syncers]
        data = newest.work.begins_after(merged) if newest is not None else None
        if newest is not None and data is not None:
            process.start_from(newest, data)
        else:
            process.start()
        return process

    def fail(self, learner: int, notice_seconds: float | None = None) -> None:
        """Kills the learner's process; the syncer is notified later."""
        process, place = self.processes.get(learner), self.places[learner]
        place.plan += 1
        if process is not None and process.alive:
            process.die()
            wait = self.takes.notice_seconds if notice_seconds is None else notice_seconds
            self._lost(process, "died", wait)
        elif place.recovering:
            self.observer.entered(learner, State.FAILED, place.chips, self.calendar.now)
        place.recovering = False

    def recover(self, learner: int) -> None:
        """Starts a process of a learner that has none; it joins once it has started up."""
        process = self.processes.get(learner)
        if process is not None and process.alive:
            return
        place = self.places[learner]
        place.plan += 1
        place.recovering = True
        place.share, place.paused = 1.0, None
        self.observer.entered(learner, State.RECONFIGURING, place.chips, self.calendar.now)
        self.calendar.after(self.takes.recovery_seconds, self._join_if_expected, learner, place.plan)

    def leave(self, learner: int) -> None:
        """The learner departs in order; its chips are free."""
        process, place = self.processes.get(learner), self.places[learner]
        place.plan += 1
        place.recovering = False
        self.observer.entered(learner, State.FINISHED, place.chips, self.calendar.now)
        if process is not None and process.alive:
            process.die(State.FINISHED)
            self._lost(process, events.LEFT, 0.0)

    def _lost(self, process: VirtualLearner, reason: str, after: float) -> None:
        for syncer, incarnation in zip(self.syncers, process.core.incarnations, strict=True):
            lost = events.LearnerLost(process.number, incarnation, reason)
            self.calendar.after(after, syncer.take, lost)

    def cut(self, learner: int, cut: bool = True, shards: Sequence[int] | None = None) -> None:
        """Partitions the learner from shards of the syncer, None: from all; or heals the partition."""
        place = self.places[learner]
        for link in (place.up, place.down):
            self.cut_link(learner, link, cut, shards)

    def cut_link(
        self, learner: int, link: Link, cut: bool = True, shards: Sequence[int] | None = None
    ) -> None:
        """The same for one direction; the learner notices it after `NOTICED` seconds."""
        for shard in range(len(self.syncers)) if shards is None else shards:
            if cut:
                link.cut.add(shard)
                self.calendar.after(NOTICED, self._disconnect, learner, link, shard)
            else:
                link.cut.discard(shard)

    def _disconnect(self, learner: int, link: Link, shard: int) -> None:
        process = self.processes.get(learner)
        if process is not None and shard in link.cut:
            process.take(events.Disconnected(shard))

    def _apply_change(self, change: Change) -> None:
        process, place = self.processes.get(change.learner), self.places[change.learner]
        match change.event:
            case "join" | "recover":
                self.recover(change.learner)
            case "fail":
                self.fail(change.learner)
            case "leave":
                self.leave(change.learner)
            case "step":
                place.share, place.paused = change.share, None
                if process is not None:
                    process.resume(change.share)
            case pause:
                place.paused = PAUSES[pause]
                if process is not None:
                    process.pause(place.paused)

    def _join_if_expected(self, learner: int, plan: int) -> None:
        if plan == self.places[learner].plan:
            self.places[learner].recovering = False
            self.join(learner)

    # Messages.

    def _send(self, process: VirtualLearner, event: events.SyncerEvent, payload: Payload, shard: int) -> None:
        size = 0
        if isinstance(event, events.LearnerJoined):
            self._routes[shard, event.learner, event.incarnation] = process
        if isinstance(event, events.FragmentArrived):
            size = self.syncer.arrays.traffic.offer[event.round.fragment]
            self.observer.transferred(event.contribution.learner, size, 0)
        times = process.place.up.arrivals(self.calendar.now, size, shard)
        for time in times:
            self.calendar.at(time, self.syncers[shard].take, event, payload)
        if isinstance(event, events.FragmentArrived) and times:
            process.sees_off(max(times))

    def deliver(
        self,
        shard: int,
        learner: int,
        incarnation: int,
        event: events.FromSyncer,
        fragments: Sequence[Payload],
        size: int,
    ) -> bool:
        """Sends an event with its fragments; returns whether it is on its way and not lost."""
        process = self._routes.get((shard, learner, incarnation))
        if process is None:
            return False
        down = process.place.down
        begins = max(self.calendar.now, down.free_at) + down.quality.latency
        times = down.arrivals(self.calendar.now, size, shard)
        for time in times:
            self.calendar.at(time, process.take, event, fragments)
        if fragments and times:
            process.sees_off(max(times))
        if size and times:
            self.observer.transferred(learner, 0, size * len(times))
            if isinstance(event, events.UpdateArrived):
                self.calendar.at(begins, process.forget_offer, event.fragment, event.version)
        return bool(times)
