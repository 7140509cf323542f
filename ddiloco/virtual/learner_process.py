"""A learner's process in virtual time: steps that take time, pauses, hangs, death (drives a LearnerActor)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddiloco.goodput.accounting import State
from ddiloco.protocol import events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import Watermark
from ddiloco.telemetry.scalars import was_skipped
from ddiloco.virtual.array_ports import LearnerArrays, Observer, Payload, VirtualCheckpoint
from ddiloco.virtual.calendar import Calendar
from ddiloco.virtual.links import Link, WaitingFragments
from ddiloco.workers.learner_actor import LearnerActor


@dataclasses.dataclass
class VirtualPlace:
    """A learner's hardware and link, which outlive its process.

    A process starts on `share` of the chips; with `paused` it takes no step until it is resumed.
    """

    step_time: Callable[[], float]  # seconds of the next step on all chips
    up: Link
    down: Link
    chips: int = 1
    share: float = 1.0
    paused: State | None = None
    starts: int = 0  # processes so far
    plan: int = 0  # goes up whenever the plan for the learner changes
    checkpoint_every: int | None = None  # steps; None: no checkpoint is left here
    # From an old to the newest, those that a process which starts may find
    checkpoints: list[VirtualCheckpoint] = dataclasses.field(default_factory=list)
    recovering: bool = False  # a process is starting


@dataclasses.dataclass
class _Step:
    """The inner step under way."""

    clock: int
    tokens: int
    metrics: Mapping[str, Any]
    left: float  # seconds on all chips, as of the last change of speed
    ends_at: float | None = None  # None while paused


class VirtualLearner:
    """One process of a learner, from its start to its death.

    The arrays take a step when it starts; its end is reported after its time. What arrives meanwhile finds
    the state after the step, as on devices that work through a queue.
    """

    def __init__(
        self,
        core: LearnerCore,
        place: VirtualPlace,
        arrays: LearnerArrays,
        calendar: Calendar,
        observer: Observer,
        send: Callable[[VirtualLearner, events.SyncerEvent, Payload, int], None],
    ) -> None:
        """`send`: an event, with what travels beside it, to a shard of the syncer."""
        self.core = core
        self._actor = LearnerActor(core, arrays, self)
        self.process = core.incarnation  # its number; the core's own goes up with each rejoin
        self.place = place
        self.alive = True
        self.arrays = arrays
        self._calendar = calendar
        self._observer = observer
        self._send = send
        self._step: _Step | None = None
        self._paused = place.paused  # what the chips do instead of stepping
        self._hung = 0  # hangs so far; only the end of the newest one counts
        self._deaf = False
        self._share = place.share  # of its chips, and so of its speed
        self._inbox: list[tuple[events.FromSyncer | events.Disconnected, Sequence[Payload]]] = []
        self._offers = WaitingFragments(place.up, calendar, functools.partial(send, self))
        self._arrives_at = 0.0  # the last of the fragments that are on their way, to it or from it
        self._beating = False
        self._said_at = calendar.now
        self._shown: tuple[State, int] | None = None
        self._asked: Callable[[VirtualCheckpoint], None] | None = None  # has the next one, for a snapshot

    @property
    def number(self) -> int:
        """The learner of this process."""
        return self.core.learner

    def start(self) -> None:
        """Asks the syncer to let it take part."""
        self._actor.join()
        self._go_on()

    def start_from(self, checkpoint: VirtualCheckpoint, data: Watermark) -> None:
        """Resumes a checkpoint; `data`: the work behind which its data continue."""
        self.arrays.restore(*checkpoint.state)
        if data.bare != checkpoint.work.reached:
            self._actor.draw_from(data.position)
        out = self._actor.resume(checkpoint.work, data)
        self._observer.resumed(self, checkpoint, out, self._calendar.now)
        self._actor.perform(out)
        self._go_on()

    def take(self, event: events.FromSyncer | events.Disconnected, fragments: Sequence[Payload] = ()) -> None:
        """Something has arrived, or a connection broke; a paused or hung process finds it later."""
        if not self.alive:
            return
        self._inbox.append((event, fragments))
        if not self._stands_still:
            self._empty_inbox()
            self._go_on()

    def sees_off(self, arrives_at: float) -> None:
        """A fragment is on its way until this time: what the learner waits for until then is the network."""
        if self.core.policy.max_run_ahead is not None and arrives_at > self._calendar.now:
            self._arrives_at = max(self._arrives_at, arrives_at)
            self._calendar.at(arrives_at, self._show)
            self._show()

    def forget_offer(self, fragment: int, version: int) -> None:
        """An update begins to arrive; an offer on an older version that waits for the link is not sent."""
        waits = self._offers.messages.get(fragment)
        if waits is not None and waits[0].contribution.version < version:
            del self._offers.messages[fragment]
            self._show()

    def ask(self, keep: Callable[[VirtualCheckpoint], None]) -> None:
        """Asks for a checkpoint for a snapshot: `keep` gets that of its next step boundary."""
        self._asked = keep
        self._go_on()

    # What happens to it.

    def pause(self, state: State) -> None:
        """Takes no step until `resume`; `state` is the state of its chips meanwhile. The process lives."""
        if not self.alive:
            return
        self._put_off_step()
        self._paused = state
        self._show()

    def resume(self, share: float | None = None) -> None:
        """Continues on this share of its chips, and so of its speed; None: as before."""
        if not self.alive:
            return
        if share is not None:
            self._put_off_step()  # the rest is done at another speed
            self._share = share
        self._paused = None
        self._continue()

    def hang(self, seconds: float) -> None:
        """Neither steps nor answers for `seconds`, whatever else happens; the syncer is not notified."""
        if not self.alive:
            return
        self._put_off_step()
        self._deaf = True
        self._hung += 1
        self._show()
        self._calendar.after(seconds, self._unhang, self._hung)

    def die(self, state: State = State.FAILED) -> None:
        """Ends the process and loses its memory. With FINISHED it has left and given its chips back."""
        if self.alive:
            self.alive = False
            self._step = None
            self._offers.messages.clear()
            self.arrays.lose()
            self._observer.entered(self.number, state, self._chips, self._calendar.now)

    def _unhang(self, order: int) -> None:
        if self.alive and order == self._hung:
            self._deaf = False
            self._continue()

    # What it does by itself.

    @property
    def _stands_still(self) -> bool:
        return self._paused is not None or self._deaf

    def _continue(self) -> None:
        if self._stands_still:
            self._show()
            return
        if self._step is not None and self._step.ends_at is None:
            self._schedule(self._step)
        self._empty_inbox()
        self._go_on()

    def _empty_inbox(self) -> None:
        while self._inbox and self.alive:
            self._handle(*self._inbox.pop(0))

    def _go_on(self) -> None:
        """Starts the next step if it may."""
        if not self.alive or self._stands_still:
            return
        if self._asked is not None and self._step is None and self.core.recovered:
            keep, self._asked = self._asked, None
            keep(self._checkpoint())
        if self._step is None and self.core.recovered and not self.core.done and not self.core.blocked:
            self._start_step()
        self._show()
        if not self._beating:
            self._beating = True
            now, beat = self._calendar.now, self.core.heartbeat
            self._calendar.at(max(self._said_at + beat, now + beat / 2), self._beat)

    def _start_step(self) -> None:
        tokens, metrics = self._actor.step()
        self._step = _Step(self.core.clock + 1, tokens, metrics, left=self.place.step_time())
        self._handle(events.StepStarted(tokens, len(self._offers.messages)))
        self._schedule(self._step)

    def _put_off_step(self) -> None:
        step = self._step
        if step is not None and step.ends_at is not None:
            step.left = (step.ends_at - self._calendar.now) * self._share
            step.ends_at = None

    def _schedule(self, step: _Step) -> None:
        step.ends_at = self._calendar.now + step.left / self._share
        self._calendar.at(step.ends_at, self._finish_step, step)

    def _finish_step(self, step: _Step) -> None:
        if self._step is not step or step.ends_at != self._calendar.now:
            return  # it was put off, or lost with the process
        self._step = None
        skipped = was_skipped(step.metrics)
        tokens = 0 if skipped else step.tokens
        self._observer.stepped(self.number, step.clock, tokens, step.metrics, self._calendar.now)
        self._handle(events.StepFinished(skipped))
        every = self.place.checkpoint_every
        if every is not None and self.core.recovered and self.core.clock % every == 0:
            self.place.checkpoints = [*self.place.checkpoints[-1:], self._checkpoint()]
        self._go_on()

    def _checkpoint(self) -> VirtualCheckpoint:
        made = VirtualCheckpoint(self.core.work, self.arrays.state())
        self._observer.checkpointed(self, made, self._calendar.now)
        return made

    def _beat(self) -> None:
        self._beating = False
        if self.alive and not self._stands_still:
            if self._calendar.now >= self._said_at + self.core.heartbeat:
                self._handle(events.Heartbeat())
            self._go_on()

    def _handle(self, event: events.LearnerEvent, fragments: Sequence[Payload] = ()) -> None:
        self._actor.handle(event, self._calendar.now, fragments)

    # As the driver of its actor.

    def handled(self, event: events.LearnerEvent, decided: list[Any], now: float) -> None:
        self._observer.learner_handled(self, event, decided, now)

    def send(self, event: events.FromLearner, shard: int) -> None:
        self._said_at = self._calendar.now
        self._send(self, event, None, shard)

    def send_offer(self, offer: events.FragmentArrived, arrays: Payload) -> None:
        fragment = offer.round.fragment
        self._offers.put(fragment, offer, arrays, fragment % len(self.core.incarnations))

    def inner_state(self, versions: tuple[int, ...]) -> None:
        """The arrays begin with one of their own."""

    def record(self, name: str, values: Mapping[str, Any]) -> None:
        self._observer.noted(name, values, self._calendar.now)

    def alarm(self, problem: str) -> None:
        raise RuntimeError(f"learner {self.number}: {problem}")

    def leave(self, why: str) -> None:
        self.die(State.FINISHED)

    @property
    def _chips(self) -> int:
        return max(1, round(self._share * self.place.chips))

    def _state(self) -> State:
        given_back = self.core.recovered and self.core.done and self._step is None
        if self._paused is not None and not given_back:
            return self._paused
        if self._deaf:
            return State.DETECTING
        if self._step is not None:
            return State.STEPPING
        if not self.core.recovered:
            return State.STARTING
        if self.core.done:
            return State.FINISHED
        on_the_way = self._offers.messages or self._calendar.now < self._arrives_at
        return State.WAITING_FOR_NETWORK if on_the_way else State.WAITING_FOR_PEERS

    def _show(self) -> None:
        shown = (self._state(), self._chips)
        if self.alive and shown != self._shown:
            self._shown = shown
            self._observer.entered(self.number, *shown, self._calendar.now)
