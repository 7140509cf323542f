"""A whole fleet in virtual time: processes of learners and syncer, and the links between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ddiloco.goodput.accounting import State
from ddiloco.outer.encoding import InvalidContribution
from ddiloco.outer.guards import Notice
from ddiloco.protocol import actions, events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import Contribution, Watermark
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import SyncerState, newest_incarnations
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.virtual.array_ports import LearnerArrays, Observer, Payload, SyncerArrays
from ddiloco.virtual.availability import PAUSES, Change
from ddiloco.virtual.calendar import Calendar, Timer
from ddiloco.virtual.learner_process import VirtualLearner, VirtualPlace
from ddiloco.virtual.links import Link, WaitingFragments
from ddiloco.workers.exchange import EventDelivery, fragments_with
from ddiloco.workers.syncer_actor import FragmentVersion, SyncerActor


class VirtualSyncer:
    """A shard's process; its commits survive its crashes."""

    def __init__(self, fleet: Fleet, arrays: SyncerArrays, shard: int = 0) -> None:
        """`shard`: which of the fleet's it is."""
        self.shard, self.arrays = shard, arrays
        self.finished_at: float | None = None
        self._durable = SyncerState.initial(fleet.policy.num_fragments)
        self._remembered: dict[int, int] = {}  # incarnations that are durable, but not yet in it
        self._fleet, self._calendar, self._observer = fleet, fleet.calendar, fleet.observer
        self._process = 0
        self._merging_until = 0.0  # merges are made one after the other
        self._updates = {
            m: WaitingFragments(place.down, fleet.calendar, self._deliver)
            for m, place in fleet.places.items()
        }
        self._alarm = Timer(fleet.calendar, lambda: self.take(events.Timeout()))
        self._sent: dict[tuple[tuple[int, int], int], int] = {}  # by receiver and fragment, the last version
        self._actor: SyncerActor | None = None
        self.restart()

    @property
    def core(self) -> SyncerCore | None:
        """The process's core, while it is up."""
        return None if self._actor is None else self._actor.core

    @property
    def offers(self) -> Collection[Contribution]:
        """Offers whose arrays are kept."""
        return () if self._actor is None else self._actor.offers.keys()

    @property
    def lineage(self) -> int:
        """Lineage of the versions of the present process."""
        return self._process

    @property
    def durable(self) -> SyncerState:
        """The state from which a new process starts."""
        if self._remembered:
            known = newest_incarnations(self._durable.incarnations, self._remembered.items())
            self.durable = self._durable.with_incarnations(known)
        return self._durable

    @durable.setter
    def durable(self, state: SyncerState) -> None:
        self._durable = state
        self._remembered.clear()

    def furthest(self, learner: int) -> Watermark:
        """The furthest merged work of the learner, or that the present process may still merge."""
        return self.durable.furthest(learner) if self.core is None else self.core.furthest(learner)

    def crash(self) -> None:
        """Ends the process: membership, open rounds and running merges are lost."""
        self._actor = None
        self._process += 1
        self._merging_until = 0.0
        self._disconnect()
        self._alarm.clear()

    def _disconnect(self) -> None:
        """Drops sent and queued messages with their connections."""
        self._sent.clear()
        for updates in self._updates.values():
            updates.messages.clear()

    def restart(self) -> None:
        """A new process, from the durable state."""
        if self._actor is None:
            fleet = self._fleet
            others = (other.durable.incarnations for other in fleet.syncers)
            known = newest_incarnations(self.durable.incarnations, *others)
            self.durable = self.durable.with_incarnations(known)
            more = self.lineage, self.shard, fleet.shards
            core = SyncerCore(fleet.policy, fleet.total_steps, self.durable, *more)
            committed = enumerate(self.durable.versions)
            versions = {p: FragmentVersion(version, self.arrays.fragment(p)) for p, version in committed}
            self._actor = SyncerActor(core, self, versions)
            self.follow_orders()

    def follow_orders(self) -> None:
        """Takes the timing that was ordered last, if any."""
        if self._fleet.timing is not None:
            self.take(self._fleet.timing)

    def take(self, event: events.SyncerEvent, payload: Payload = None, connection: int | None = None) -> None:
        """Handles an event; while the process is down, the event is lost.

        `connection`: the lineage of the process that the event was sent to; lost with it, as a handshake is.
        """
        if self._actor is None or connection not in (None, self.lineage):
            return
        if isinstance(event, events.FragmentArrived):
            event, payload = self._received(event, payload)
        if isinstance(event, events.FragmentArrived):
            self._actor.take_offer(event, payload, self._calendar.now)
        else:
            self._actor.handle(event, now=self._calendar.now)
        self._alarm.set(self._actor.core.next_deadline())

    def _received(
        self, event: events.FragmentArrived, payload: Payload
    ) -> tuple[events.FragmentArrived | events.OfferFailed, Payload]:
        """The event with its arrays; OfferFailed if the fragment is invalid."""
        try:
            return event, self.arrays.received(event.round.fragment, payload, event.contribution.learner)
        except InvalidContribution as error:
            c, problem = event.contribution, str(error)
        self._observer.guarded(event.round, (Notice("unsound", c.learner, problem),), self._calendar.now)
        return events.OfferFailed(event.round, c.learner, c.incarnation, problem), None

    # As the driver of its actor.

    def handled(self, event: events.SyncerEvent, decided: list[Any], now: float) -> None:
        self._observer.syncer_handled(event, decided, now, self.shard)

    def refuse(self, event: events.SyncerEvent, error: Exception) -> actions.Drop:
        raise error

    def remember(self, incarnations: Sequence[tuple[int, int]]) -> bool:
        self._remembered.update(incarnations)
        return True

    def deliver(self, receiver: tuple[int, int], delivery: EventDelivery) -> None:
        event = delivery.event
        if isinstance(event, events.UpdateArrived):
            self._updates[receiver[0]].put(event.fragment, receiver, event, delivery.fragments)
        else:
            self._deliver(receiver, event, delivery.fragments)

    def began(self, learner: int, incarnation: int) -> None:
        """Links need no notification."""

    def merge(self, merge: actions.Merge, given: list[tuple[Contribution, Payload]]) -> None:
        begins = max(self._calendar.now, self._merging_until)
        self._merging_until = begins + self._fleet.takes.merge()
        self._calendar.at(self._merging_until, self._merge, self._process, merge, given)

    def record(self, name: str, values: Mapping[str, Any]) -> None:
        self._observer.noted(name, values, self._calendar.now)

    def finish(self) -> None:
        self.finished_at = self._calendar.now

    def _deliver(
        self, receiver: tuple[int, int], event: events.FromSyncer, payload: Sequence[Payload]
    ) -> None:
        if self._has(receiver, event):
            return
        if isinstance(event, events.Welcomed):  # it brings what waits
            self._updates[receiver[0]].messages.clear()
        size = self._size(receiver, event)
        if self._fleet.deliver(self.shard, *receiver, event, payload, size):
            self._sent.update(((receiver, p), v) for p, v in _versions(event).items())

    def _has(self, receiver: tuple[int, int], event: events.FromSyncer) -> bool:
        """Whether the link already carries its fragments: like a real connection it carries each once."""
        match event:
            case events.Welcomed():
                return all((receiver, p) in self._sent for p in fragments_with(event))
            case events.UpdateArrived(fragment=p, version=version):
                return self._sent.get((receiver, p)) == version
        return False

    def _size(self, receiver: tuple[int, int], event: events.FromSyncer) -> int:
        """Bytes of an event: differences to the receiver's version, if they are half as many."""
        welcomed, traffic, size = isinstance(event, events.Welcomed), self.arrays.traffic, 0
        for p, version in _versions(event).items():
            missing = version - self._sent.get((receiver, p), version)
            differences = missing * traffic.difference[p]
            follows = not welcomed and 0 < 2 * differences <= traffic.version[p]
            size += differences if follows else traffic.version[p]
        return size

    def _merge(self, process: int, action: actions.Merge, given: list) -> None:
        """Merges and commits, then notifies the core: a crash in between leaves the commit."""
        if process != self._process:
            return
        made = self.arrays.merge(action.round.fragment, given, action.interval)
        if not made.empty:
            merged = [c for c in action.contributions if c.learner not in made.left_out]
            self.durable = self.durable.after(action.round, self.lineage, merged, action.delays)
            self._observer.merged(action, made.left_out, self._calendar.now)
        self._observer.guarded(action.round, made.notices, self._calendar.now)
        if self._actor is not None:
            finished, version = events.MergeFinished(action.round, made.left_out), action.version - made.empty
            self._actor.perform(self._actor.merged(finished, version, made, made.metrics, self._calendar.now))
            self._alarm.set(self._actor.core.next_deadline())


def _versions(event: events.FromSyncer) -> dict[int, int]:
    """The version of each fragment that an event carries."""
    match event:
        case events.Welcomed(versions=versions):
            return dict(zip(fragments_with(event), versions, strict=True))
        case events.UpdateArrived(fragment=p, version=version):
            return {p: version}
    return {}


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
        self.timing: events.TimingSet | None = None
        self._learner_arrays = learner_arrays
        self._routes: dict[tuple[int, int, int], VirtualLearner] = {}  # by shard, learner and incarnation
        self.syncers: list[VirtualSyncer] = []
        for shard in range(shards):
            self.syncers.append(VirtualSyncer(self, syncer_arrays, shard))

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

    def set_timing(self, timing: events.TimingSet, delay: Callable[[], float] = lambda: 0.0) -> None:
        """Orders another timing, which each shard follows after a delay, and from its start on."""
        self.timing = timing
        for syncer in self.syncers:
            self.calendar.after(delay(), syncer.follow_orders)

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
        size, connection, syncer = 0, None, self.syncers[shard]
        if isinstance(event, events.LearnerJoined):
            self._routes[shard, event.learner, event.incarnation] = process
            connection = syncer.lineage
        if isinstance(event, events.FragmentArrived):
            size = self.syncer.arrays.traffic.offer(process.number)[event.round.fragment]
            self.observer.transferred(process.number, size, 0)
        times = process.place.up.arrivals(self.calendar.now, size, shard)
        for time in times:
            self.calendar.at(time, syncer.take, event, payload, connection)
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
