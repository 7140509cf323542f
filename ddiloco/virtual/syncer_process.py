"""A shard of the syncer in virtual time: merges that take their time, crashes (drives a SyncerCore)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddiloco.outer.encoding import InvalidContribution
from ddiloco.outer.guards import Notice
from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Watermark
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import SyncerState, newest_incarnations
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.virtual.array_ports import Observer, Payload, SyncerArrays
from ddiloco.virtual.calendar import Calendar, Timer
from ddiloco.virtual.links import Link, WaitingFragments
from ddiloco.workers.exchange import Arrivals, fragments_with
from ddiloco.workers.snapshots.messages import sender_of

# Whom, ..., bytes; returns whether the link has taken it.
Incarnations = Sequence[tuple[int, int]]
Deliver = Callable[[int, int, events.FromSyncer, Sequence[Payload], int], bool]


class VirtualSyncer:
    """A shard's process; what it has committed survives its crashes."""

    def __init__(
        self,
        policy: SyncPolicy,
        total_steps: int | None,
        arrays: SyncerArrays,
        calendar: Calendar,
        observer: Observer,
        merge_time: Callable[[], float],
        deliver: Deliver,
        downlinks: Mapping[int, Link],
        shard: int = 0,
        shards: int = 1,
    ) -> None:
        """`downlinks`: by learner. `shard`: of so many, whose fragments it has."""
        self.shard, self._shards = shard, shards
        self.known: Callable[[], Sequence[Incarnations]] = lambda: ()  # on the disks of all shards
        self.finished_at: float | None = None
        self.durable = SyncerState.initial(policy.num_fragments)
        self._policy, self._total_steps = policy, total_steps
        self.arrays = arrays
        self._calendar = calendar
        self._observer = observer
        self._merge_time = merge_time
        self._deliver = deliver
        self._process = 0
        self._merging_until = 0.0  # merges are made one after the other
        self._updates = {m: WaitingFragments(link, calendar, self._tell) for m, link in downlinks.items()}
        self._alarm = Timer(calendar, lambda: self.take(events.Timeout()))
        self._arrivals: Arrivals[Payload] = Arrivals()
        self._early: dict[tuple[int, int], tuple[events.FragmentArrived, Payload]] = {}
        self._sent: dict[tuple[tuple[int, int], int], int] = {}  # by receiver and fragment, the last version
        self.core: SyncerCore | None = SyncerCore(policy, total_steps, shard=shard, shards=shards)

    @property
    def lineage(self) -> int:
        """Of the versions that the present process makes."""
        return self._process

    def furthest(self, learner: int) -> Watermark:
        """The furthest of a learner's work that is merged, or that the present process may merge."""
        return self.durable.furthest(learner) if self.core is None else self.core.furthest(learner)

    def crash(self) -> None:
        """Ends the process: membership, rounds in flight and merges under way are lost."""
        self.core = None
        self._process += 1
        self._merging_until = 0.0
        self._disconnect()
        self._alarm.clear()

    def _disconnect(self) -> None:
        """What was sent, or was to be, is forgotten with its connections."""
        self._sent.clear()
        for updates in self._updates.values():
            updates.messages.clear()

    def restart(self) -> None:
        """A new process, from what was durable."""
        if self.core is None:
            self._arrivals = Arrivals()
            self._early.clear()
            known = newest_incarnations(self.durable.incarnations, *self.known())
            self.durable = self.durable.with_incarnations(known)
            more = self.lineage, self.shard, self._shards
            self.core = SyncerCore(self._policy, self._total_steps, self.durable, *more)

    def take(self, event: events.SyncerEvent, payload: Payload = None) -> None:
        """Handles an event; while the process is down, the event is lost."""
        if self.core is None:
            return
        if isinstance(event, events.FragmentArrived):
            key = event.contribution.learner, event.round.fragment
            self._early.pop(key, None)
            if self.core.is_early(event):  # it overtook its learner's reports
                self._early[key] = event, payload
                return
            event, payload = self._received(event, payload)
        out = self.core.handle(event, self._calendar.now)
        if isinstance(event, events.LearnerJoined):
            self.durable = self.core.state()
        if isinstance(event, events.FragmentArrived):
            self._arrivals.keep(event, out, payload)
        self._observer.syncer_handled(event, out, self._calendar.now, self.shard)
        for action in out:
            self._perform(action, payload)
        self._alarm.set(self.core.next_deadline())
        if isinstance(event, events.FromLearner):
            for key in [key for key in self._early if key[0] == sender_of(event)[0]]:
                self.take(*self._early.pop(key))

    def _received(
        self, event: events.FragmentArrived, payload: Payload
    ) -> tuple[events.FragmentArrived | events.OfferFailed, Payload]:
        """The event with what is to be merged; if the fragment is unsound, that the offer failed."""
        try:
            return event, self.arrays.received(event.round.fragment, payload)
        except InvalidContribution as error:
            c, problem = event.contribution, str(error)
        self._observer.guarded(event.round, (Notice("unsound", c.learner, problem),), self._calendar.now)
        return events.OfferFailed(event.round, c.learner, c.incarnation, problem), None

    def _perform(self, action: actions.SyncerAction, metrics: Any) -> None:
        match action:
            case actions.Tell(receivers, event):
                payload = [self.arrays.fragment(p) for p in fragments_with(event)]
                for receiver in receivers:
                    told = action.to(receiver[0])
                    if isinstance(told, events.UpdateArrived):
                        self._updates[receiver[0]].put(told.fragment, receiver, told, payload)
                    else:
                        self._tell(receiver, told, payload)
            case actions.Merge():
                given = self._arrivals.take(action)
                begins = max(self._calendar.now, self._merging_until)
                self._merging_until = begins + self._merge_time()
                self._calendar.at(self._merging_until, self._merge, self._process, action, given)
            case actions.Drop():
                self._observer.dropped(action, self._calendar.now)
            case actions.Record():
                self._arrivals.forget(action)
                values = {**action.values, **(metrics or {})} if action.name == "round" else action.values
                self._observer.noted(action.name, values, self._calendar.now)
            case actions.Finish():
                self.finished_at = self._calendar.now

    def _tell(self, receiver: tuple[int, int], event: events.FromSyncer, payload: Sequence[Payload]) -> None:
        if self._has(receiver, event):
            return
        if isinstance(event, events.Welcomed):  # it brings what waits
            self._updates[receiver[0]].messages.clear()
        if self._deliver(*receiver, event, payload, self._size(receiver, event)):
            self._sent.update(((receiver, p), v) for p, v in _versions(event).items())

    def _has(self, receiver: tuple[int, int], event: events.FromSyncer) -> bool:
        """Whether the link has taken its fragments already: like a real connection it carries each once."""
        match event:
            case events.Welcomed():
                return all((receiver, p) in self._sent for p in fragments_with(event))
            case events.UpdateArrived(fragment=p, version=version):
                return self._sent.get((receiver, p)) == version
        return False

    def _size(self, receiver: tuple[int, int], event: events.FromSyncer) -> int:
        """Bytes that go with an event: differences to what a learner was sent, if they are half as many."""
        welcomed, traffic, size = isinstance(event, events.Welcomed), self.arrays.traffic, 0
        for p, version in _versions(event).items():
            missing = version - self._sent.get((receiver, p), version)
            differences = missing * traffic.difference[p]
            follows = not welcomed and 0 < 2 * differences <= traffic.version[p]
            size += differences if follows else traffic.version[p]
        return size

    def _merge(self, process: int, action: actions.Merge, given: list) -> None:
        """Merges and commits, then tells the core: after a crash in between, the commit stands."""
        if process != self._process:
            return
        made = self.arrays.merge(action.round.fragment, given)
        if not made.empty:
            merged = [c for c in action.contributions if c.learner not in made.left_out]
            self.durable = self.durable.after(action.round, self.lineage, merged, action.delays)
            self._observer.merged(action, made.left_out, self._calendar.now)
        self._observer.guarded(action.round, made.notices, self._calendar.now)
        self.take(events.MergeFinished(action.round, made.left_out), made.metrics)


def _versions(event: events.FromSyncer) -> dict[int, int]:
    """The version of each fragment that goes with an event."""
    match event:
        case events.Welcomed(versions=versions):
            return dict(zip(fragments_with(event), versions, strict=True))
        case events.UpdateArrived(fragment=p, version=version):
            return {p: version}
    return {}
