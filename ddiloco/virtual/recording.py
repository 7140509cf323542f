"""Snapshots of a virtual fleet by Chandy and Lamport's markers, while it runs and without moving anything.

The syncer is recorded between two events, at t0; each learner, with its place and its processes, when the
syncer's marker or anything that was sent after it gets there. Between t0 and that moment a learner's own
doing is noted as far as others notice it: messages to the syncer, which are the state of the channel, and
what the observer heard (`ghosts.py`). Markers take as long as the link, and may be lost as other messages are
and are then sent again; they take no bandwidth, draw from no stream of the fleet and are no entries of its
calendar.
"""

from __future__ import annotations

import dataclasses
import heapq
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ddiloco.protocol.clocks import VectorClock
from ddiloco.protocol.snapshot import Mark, SnapshotCore
from ddiloco.virtual.calendar import Entry
from ddiloco.virtual.calls import SYNCER, owner, write_entry
from ddiloco.virtual.fleet import Fleet
from ddiloco.virtual.ghosts import Relay
from ddiloco.virtual.graph import GraphError, Writer
from ddiloco.virtual.learner_process import VirtualLearner
from ddiloco.virtual.ports import Held
from ddiloco.virtual.vocabulary import vocabulary


@dataclasses.dataclass(frozen=True)
class Document:
    """One process as it was recorded.

    Attributes:
      values: JSON values.
      payloads: arrays that the values refer to by their places.
      held: what the process's own arrays held; None: it has none.
      clock: what its state follows from; None: it has done nothing.
      told: JSON values that say the same in brief, for those who come back without the rest: of the syncer
        the fields of `SyncerState`; of a learner that has been welcomed and lives `learner`, `incarnation`,
        `clock`, `fragments` (rows of `FragmentWork`), `time`, and as `untold` clock, tokens and time of the
        steps in its state of which the observer has not heard at the syncer's cut; {} of any other.
    """

    values: dict[str, Any]
    payloads: Sequence[Any] | Mapping[int, Any]
    held: Held | None
    clock: VectorClock | None = None
    told: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Recording:
    """A consistent cut through a fleet.

    Attributes:
      number: of the snapshot.
      step: the global step, as of the syncer.
      time: when the syncer was recorded, in virtual seconds.
      learners: by number, all of them, dead or alive.
      in_flight: sender, receiver, what it was and when it arrives, of every message.
    """

    number: int
    step: int
    time: float
    syncer: Document
    learners: Mapping[int, Document]
    in_flight: list[list[Any]]


class Recorder:
    """Watches a fleet's calendar and takes snapshots of the fleet; one at a time, none moves an event."""

    def __init__(
        self,
        fleet: Fleet,
        relay: Relay,
        timeout: float,
        wanted: Callable[[], int | None],
        keep: Callable[[Recording], None],
        give_up: Callable[[int, str], None] = lambda number, reason: None,
        *,
        observer_state: Callable[[int | None], dict[str, Any]] = lambda learner: {},
        payloads: Iterable[type] = (),
        epoch: int = 0,
    ) -> None:
        """Begins to watch.

        Args:
          fleet: its observer is `relay`.
          relay: between the fleet and whoever observes it.
          timeout: virtual seconds after which a snapshot is given up.
          wanted: asked between two events, while none is under way: the number of the snapshot to begin.
          keep: takes a finished one.
          give_up: hears of one that was not finished, and why.
          observer_state: JSON values, stored with a learner's or, for None, with the syncer's.
          payloads: classes of what travels beside messages.
          epoch: number of the newest snapshot of an earlier run.
        """
        self._fleet, self._relay = fleet, relay
        self._core = SnapshotCore(timeout, epoch)
        self._wanted, self._keep, self._give_up = wanted, keep, give_up
        self._observer_state = observer_state
        self._vocabulary = vocabulary(payloads)
        self._cut: _Cut | None = None
        fleet.calendar.watcher = self

    def end(self) -> None:
        """The run is over: one that is under way is given up."""
        if self._cut is not None:
            self._abandon("the run ended before every learner had recorded its state")

    # What the calendar tells.

    def comes(self, entry: Entry) -> None:
        """Delivers markers that are due; who gets a message from past the cut is recorded before it."""
        if self._cut is not None:
            self._guarded(self._before, entry)

    def entered(self, entry: Entry) -> None:
        """Keeps what an unrecorded learner sends; marks what is sent from past the cut."""
        if self._cut is not None:
            self._guarded(self._cut.entered, entry)

    def happened(self, entry: Entry) -> None:
        """Settles what an event changed, and begins the next snapshot if it is time."""
        if self._cut is not None:
            self._guarded(self._after, entry)
        if self._cut is None and self._fleet.syncer.core is not None and not self._fleet.over:
            number = self._wanted()
            if number is not None:
                self._guarded(self._begin, number)

    # A snapshot.

    def _begin(self, number: int) -> None:
        fleet, now = self._fleet, self._fleet.calendar.now
        alive = [m for m in fleet.places if _alive(fleet, m)]
        cut = self._cut = _Cut(fleet, self._relay, self._vocabulary, number, self._observer_state)
        cut.record_syncer()
        for mark in self._core.begin(number, alive, now):
            cut.send(mark.learner, "down", now)
        for m in fleet.places:
            if m not in alive:
                cut.record(m, now)

    def _before(self, entry: Entry) -> None:
        cut, core = self._cut, self._core
        while cut.marks and cut.marks[0][0] <= entry.time and not core.expired(cut.marks[0][0]):
            time, _, learner, way = heapq.heappop(cut.marks)
            if way == "up":
                core.marked(Mark(cut.number, learner))
            elif way == "down":
                cut.record(learner, time)
                cut.send(learner, "up", time)
            else:
                cut.send(learner, way.removeprefix("again "), time)
        if core.done:
            self._finish()
        elif core.expired(entry.time):
            self._abandon(f"not every learner had recorded its state within {core.timeout:g} s")
        else:
            cut.begins(entry)

    def _after(self, entry: Entry) -> None:
        self._cut.ended(entry)
        if self._fleet.syncer.core is None:
            self._abandon("the syncer crashed")
            return
        who = owner(entry)
        if who != SYNCER and who not in self._cut.learners and not _alive(self._fleet, who):
            self._cut.record(who, entry.time)
            self._core.gone(who)

    def _finish(self) -> None:
        self._core.end()
        cut, self._cut = self._cut, None
        self._keep(cut.recording())

    def _abandon(self, reason: str) -> None:
        self._core.end()
        cut, self._cut = self._cut, None
        self._relay.kept = None
        self._give_up(cut.number, reason)

    def _guarded(self, do: Callable[[Any], None], what: Any) -> None:
        try:
            do(what)
        except GraphError as error:
            self._abandon(str(error))


class _Cut:
    """What has been recorded of one snapshot so far."""

    def __init__(
        self,
        fleet: Fleet,
        relay: Relay,
        known: Any,
        number: int,
        observer_state: Callable[[int | None], dict[str, Any]],
    ) -> None:
        self.number = number
        self._observer_state = observer_state
        self.marks: list[tuple[float, int, int, str]] = []  # time, order, learner, way
        self.learners: dict[int, Document] = {}
        self._fleet, self._relay = fleet, relay
        self._syncer: Document | None = None
        self._step = fleet.syncer.durable.step
        self._time = fleet.calendar.now
        self._writers = {m: Writer(known, {"policy": fleet.policy}) for m in (SYNCER, *fleet.places)}
        self._late: set[int] = set()  # entries from past the cut
        self._channels: dict[int, list[Any]] = {m: [] for m in fleet.places}
        self._ghosts: dict[int, list[Any]] = {m: [] for m in fleet.places}
        self._untold: dict[int, list[tuple[int, int, float]]] = {m: [] for m in fleet.places}
        self._in_flight: list[list[Any]] = []
        self._acting: int | None = None
        self._entered_before = 0
        self._chance = random.Random(f"marks of snapshot {number}")
        self._sent = 0

    def send(self, learner: int, way: str, now: float) -> None:
        """Sends a marker on a learner's link, `up` or `down`; one that is lost is sent again later."""
        link = getattr(self._fleet.places[learner], way)
        lost = link.cut or self._chance.random() < link.quality.loss
        self._sent += 1
        coming = (now + self._fleet.policy.heartbeat, f"again {way}") if lost else (link.soonest(now), way)
        heapq.heappush(self.marks, (coming[0], self._sent, learner, coming[1]))

    def begins(self, entry: Entry) -> None:
        """An event is about to happen."""
        who = owner(entry)
        if entry.order in self._late:
            if self._is_ghost(who):
                self.record(who, entry.time)
            self._late.discard(entry.order)
        self._acting, self._entered_before = who, self._fleet.calendar.entered
        self._relay.kept = [] if self._is_ghost(who) else None

    def entered(self, entry: Entry) -> None:
        """An event has made an entry."""
        if not self._is_ghost(self._acting):
            self._late.add(entry.order)
        elif owner(entry) == SYNCER:
            writer = self._writers[self._acting]
            self._channels[self._acting].append(write_entry(writer, entry))
            self._note(entry, self._acting)

    def ended(self, entry: Entry) -> None:
        """The event has happened."""
        if self._relay.kept is not None:
            made = self._fleet.calendar.entered - self._entered_before
            down = self._fleet.places[self._acting].down
            told = self._writers[self._acting].write(tuple(self._relay.kept))
            self._untold[self._acting] += [
                a[1:3] + a[4:] for name, a in self._relay.kept if name == "stepped"
            ]
            self._ghosts[self._acting].append([entry.time, entry.order, told, made, down.cut])
        self._relay.kept = self._acting = None

    def record_syncer(self) -> None:
        """Records the syncer's process, with what it needs to send, and what is on its way to it."""
        fleet, writer = self._fleet, self._writers[SYNCER]
        calendar = fleet.calendar
        entries = [entry for entry in calendar.entries() if owner(entry) == SYNCER]
        for entry in entries:
            self._note(entry, None)
        values = {
            "syncer": writer.fields(fleet.syncer),
            "links": [[m, writer.fields(place.down)] for m, place in fleet.places.items()],
            "entries": [write_entry(writer, entry) for entry in entries],
            "calendar": [calendar.now, calendar.happened, calendar.entered],
            "observer": self._observer_state(None),
        }
        core, held = fleet.syncer.core, fleet.syncer.arrays.state()
        told = dataclasses.asdict(core.state())
        self._syncer = Document(values, writer.arrays, held, core.vector_clock, told)

    def record(self, learner: int, now: float) -> None:
        """Records a learner's place and processes, what will befall them, and what is on its way there."""
        if learner in self.learners:
            return
        fleet, writer = self._fleet, self._writers[learner]
        routes, newest = fleet.routes(learner), fleet.processes.get(learner)
        processes = {process.process: process for process in routes.values()}
        for number, process in processes.items():
            writer.name(f"process {number}", process)
        entries = [entry for entry in fleet.calendar.entries() if owner(entry) == learner]
        entries = [entry for entry in entries if entry.order not in self._late]
        for entry in entries:
            self._note(entry, learner)
        values = {
            "place": writer.fields(fleet.places[learner]),
            "processes": [[number, writer.fields(process)] for number, process in processes.items()],
            "routes": [[number, process.process] for number, process in routes.items()],
            "newest": None if newest is None else newest.process,
            "entries": [write_entry(writer, entry) for entry in entries],
            "channel": self._channels[learner],
            "ghosts": self._ghosts[learner],
            "observer": self._observer_state(learner),
        }
        if newest is None:
            self.learners[learner] = Document(values, writer.arrays, None)
            return
        held, clock = newest.arrays.state(), newest.core.vector_clock
        told = _in_brief(newest, self._untold[learner], now)
        self.learners[learner] = Document(values, writer.arrays, held, clock, told)

    def recording(self) -> Recording:
        """All of it."""
        return Recording(
            self.number,
            self._step,
            self._time,
            self._syncer,
            dict(sorted(self.learners.items())),
            self._in_flight,
        )

    def _is_ghost(self, who: int | None) -> bool:
        return who is not None and who != SYNCER and who not in self.learners

    def _note(self, entry: Entry, learner: int | None) -> None:
        """Tells of a message in flight, for whoever looks into a snapshot."""
        message = next((a for a in entry.arguments if dataclasses.is_dataclass(a)), None)
        to_syncer = owner(entry) == SYNCER
        if getattr(entry.call, "__name__", None) not in ("take", "_answer_pull") or message is None:
            return
        sender = "syncer" if not to_syncer else str(_sender(message, learner))
        receiver = "syncer" if to_syncer else str(learner)
        self._in_flight.append([sender, receiver, type(message).__name__, entry.time])


def _sender(message: Any, learner: int | None) -> Any:
    inner = getattr(message, "report", None) or getattr(message, "contribution", None) or message
    return getattr(inner, "learner", learner)


def _in_brief(
    process: VirtualLearner, untold: Sequence[tuple[int, int, float]], now: float
) -> dict[str, Any]:
    core = process.core
    if not process.alive or not core.recovered:
        return {}
    under_way = [] if process.step is None else [(*process.step, now)]
    return {
        "learner": core.learner,
        "incarnation": core.incarnation,
        "clock": core.clock,
        "fragments": [list(dataclasses.astuple(fragment)) for fragment in core.fragments],
        "time": now,
        "untold": [list(step) for step in (*untold, *under_way)],
    }


def _alive(fleet: Fleet, learner: int) -> bool:
    return any(process.alive for process in fleet.routes(learner).values())
