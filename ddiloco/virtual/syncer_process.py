"""A shard of the syncer in virtual time: merges that take their time, crashes (drives a SyncerCore)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddiloco.outer.encoding import InvalidContribution
from ddiloco.outer.guards import Notice
from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Contribution, Watermark
from ddiloco.protocol.state import SyncerState, newest_incarnations
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.virtual.array_ports import Payload, SyncerArrays
from ddiloco.virtual.calendar import Timer
from ddiloco.virtual.links import WaitingFragments
from ddiloco.workers.exchange import EventDelivery, fragments_with
from ddiloco.workers.syncer_actor import FragmentVersion, SyncerActor

if TYPE_CHECKING:
    from ddiloco.virtual.fleet import Fleet


class VirtualSyncer:
    """A shard's process; its commits survive its crashes."""

    def __init__(self, fleet: Fleet, arrays: SyncerArrays, shard: int = 0) -> None:
        """`shard`: which of the fleet's it is."""
        self.shard, self.arrays = shard, arrays
        self.finished_at: float | None = None
        self.durable = SyncerState.initial(fleet.policy.num_fragments)
        self._fleet, self._calendar, self._observer = fleet, fleet.calendar, fleet.observer
        self._process = 0
        self._merging_until = 0.0  # merges are made one after the other
        self._updates = {
            m: WaitingFragments(place.down, fleet.calendar, self._tell) for m, place in fleet.places.items()
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

    def take(self, event: events.SyncerEvent, payload: Payload = None) -> None:
        """Handles an event; while the process is down, the event is lost."""
        if self._actor is None:
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
            return event, self.arrays.received(event.round.fragment, payload)
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
        self.durable = self.durable.with_incarnations(tuple(incarnations))
        return True

    def deliver(self, receiver: tuple[int, int], delivery: EventDelivery) -> None:
        event = delivery.event
        if isinstance(event, events.UpdateArrived):
            self._updates[receiver[0]].put(event.fragment, receiver, event, delivery.fragments)
        else:
            self._tell(receiver, event, delivery.fragments)

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

    def _tell(self, receiver: tuple[int, int], event: events.FromSyncer, payload: Sequence[Payload]) -> None:
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
        made = self.arrays.merge(action.round.fragment, given)
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
