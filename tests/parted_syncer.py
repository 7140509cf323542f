"""A syncer of several processes in virtual time: an authority and parts, each of which may crash alone."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

from ddiloco.protocol import actions, events, news
from ddiloco.protocol.messages import Watermark
from ddiloco.protocol.parts import AuthorityCore, FromPart, Part, PartConnected, ToPart
from ddiloco.protocol.round import Round
from ddiloco.protocol.schedule import fragments_of
from ddiloco.virtual.calendar import Timer
from ddiloco.virtual.syncer_process import VirtualSyncer
from ddiloco.workers.syncer_actor import FragmentVersion, SyncerActor

DELAY = 0.05  # mean seconds of a message between authority and part


@dataclasses.dataclass
class _Process:
    """The authority's process, or a part's; its core is None while it is down."""

    number: int  # of the part; -1: the authority
    core: Any = None
    starts: int = 0
    alarm: Timer | None = None
    heard_until: float = 0.0  # messages to it keep their order: no later one arrives before this
    merging_until: float = 0.0  # merges of a part are made one after the other
    connection: int = 0  # between a part and the authority; those of an older one are lost


class PartedSyncer(VirtualSyncer):
    """Drives an `Authority` and its `Part`s, with messages between them."""

    def __init__(self, *of_fleet: Any, parts: int, rng: random.Random) -> None:
        """`of_fleet`: what a `VirtualSyncer` is given; `parts`: how many."""
        self._parts = [_Process(s) for s in range(parts)]
        self._authority = _Process(-1)
        self._rng = rng
        self._starts = 0
        super().__init__(*of_fleet)
        self.on_death: Callable[[int], None] = lambda part: None
        # Carries out what the cores decide; its core is what the invariants ask for versions.
        self.policy = self._fleet.policy
        versions = {p: FragmentVersion(0, None) for p in range(self.policy.num_fragments)}
        self._actor = SyncerActor(self, self, versions)
        for process in (self._authority, *self._parts):
            process.alarm = Timer(self._calendar, functools.partial(self._handle, process, events.Timeout()))
        self.restart()

    @property
    def lineage(self) -> int:
        """Of the commit that the observer hears of."""
        return self._committing

    @property
    def versions(self) -> tuple[int, ...]:
        """What is durable."""
        return self.durable.versions

    @property
    def merged_steps(self) -> tuple[int, ...]:
        """What is durable."""
        return self.durable.merged_steps

    @property
    def live(self) -> tuple[int, ...]:
        """As the authority has it."""
        core = self._authority.core
        return () if core is None else core.live

    @property
    def rounds(self) -> tuple[Round, ...]:
        """Those in flight of all parts."""
        return tuple(r for part in self._parts if part.core is not None for r in part.core.rounds)

    def furthest(self, learner: int) -> Watermark:
        """What is durable."""
        return self.durable.furthest(learner)

    def next_deadline(self) -> float | None:
        """Each process sets its own alarm."""
        return None

    # Crashes.

    def crash(self, whole: bool = False) -> None:
        """One of the processes dies, or all of them."""
        self._disconnect()
        everyone = [self._authority, *self._parts]
        for process in everyone if whole else self._rng.choice([everyone, *([one] for one in everyone)]):
            self.on_death(process.number)
            process.core = None
            process.starts += 1
            process.merging_until = 0.0
            process.alarm.clear()

    def restart(self) -> None:
        """Starts what is down, from what is durable, and connects it."""
        for process in (*self._parts, self._authority):
            if process.core is None and process.alarm is not None:
                self._starts += 1
                if process is self._authority:
                    parts = len(self._parts)
                    process.core = AuthorityCore(
                        self._fleet.policy, self._fleet.total_steps, self.durable, parts
                    )
                    for part in self._parts:
                        self._connect(part)
                else:
                    own = fragments_of(process.number, len(self._parts), self._fleet.policy.num_fragments)
                    process.core = Part(
                        self._fleet.policy, self._fleet.total_steps, self.durable, own, self._starts
                    )
                    self._connect(process)

    def _connect(self, part: _Process) -> None:
        """A new connection: the part hears who is there, and says what it has committed."""
        part.connection += 1
        if part.core is not None and self._authority.core is not None:
            self._handle(self._authority, PartConnected(part.number))

    # Messages.

    def take(self, event: events.SyncerEvent, payload: Any = None) -> None:
        """A message of a learner, or about one, arrives at whom it is for."""
        if isinstance(event, events.Timeout):
            return
        if not isinstance(event, events.FragmentArrived | events.OfferFailed):
            self._handle(self._authority, event)
            return
        part = self._parts[event.round.fragment % len(self._parts)]
        if isinstance(event, events.FragmentArrived):
            event, _ = self._received(event, payload)
        self._handle(part, event)

    def _handle(
        self, process: _Process, event: events.SyncerEvent | PartConnected | FromPart | news.News
    ) -> None:
        if process.core is None:
            return
        said = self._decide(process, event)
        if isinstance(event, events.FragmentArrived):
            self._actor.offers.setdefault(event, None)
        if isinstance(event, events.LearnerJoined):
            self.durable = self.durable.with_incarnations(process.core.state().incarnations)
        out = [one for one in said if isinstance(one, actions.SyncerAction)]
        if out or not isinstance(event, PartConnected):  # at the very start there is nobody to observe it
            seen = event if isinstance(event, events.SyncerEvent) else events.Timeout()
            self._observer.syncer_handled(seen, out, self._calendar.now)
        self._carry_out(process, said)

    def _decide(self, process: _Process, event: Any) -> list[Any]:
        return process.core.handle(event, self._calendar.now)

    def _hear(self, process: _Process, part: _Process, connection: int, told: news.News | FromPart) -> None:
        if connection == part.connection:
            self._handle(process, told)

    def _carry_out(self, process: _Process, said: list[Any]) -> None:
        for one in said:
            match one:
                case news.Committed() | news.Stuck() | news.Over() | news.Doubted():
                    self._send(self._authority, process, FromPart(process.number, one))
                case ToPart(None, told):
                    for part in self._parts:
                        self._send(part, part, told)
                case ToPart(number, told):
                    self._send(self._parts[number], self._parts[number], told)
                case _:
                    self._actor.perform([one])
        if process.core is not None:
            process.alarm.set(process.core.next_deadline())

    def _send(self, to: _Process, part: _Process, told: news.News | FromPart) -> None:
        """Over the connection of a part, which keeps the order."""
        at = self._calendar.now + self._rng.expovariate(1 / DELAY)
        to.heard_until = at = max(at, to.heard_until)
        self._calendar.at(at, self._hear, to, part, part.connection, told)

    def merge(self, merge: actions.Merge, given: list[Any]) -> None:
        """By the fragment's part, after those before it."""
        process = self._parts[merge.round.fragment % len(self._parts)]
        begins = max(self._calendar.now, process.merging_until)
        process.merging_until = begins + self._fleet.takes.merge()
        self._calendar.at(process.merging_until, self._merge_at, process, process.starts, merge, given)

    def _merge_at(self, part: _Process, starts: int, merge: actions.Merge, given: list[Any]) -> None:
        """Merges and commits, then tells the part; a crash may come in between."""
        if part.starts != starts:
            return
        made = self.arrays.merge(merge.round.fragment, given)
        if not made.empty:
            self._committing = part.core.lineage
            merged = [c for c in merge.contributions if c.learner not in made.left_out]
            self.durable = self.durable.after(merge.round, self._committing, merged, merge.delays)
            self._observer.merged(merge, made.left_out, self._calendar.now)
        if part.starts == starts:
            self._handle(part, events.MergeFinished(merge.round, made.left_out))
