"""A learner at work: inner steps without a pause, fragments out, updates in (driver of a LearnerCore)."""

from __future__ import annotations

import collections
import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax

from ddiloco.goodput.accounting import State
from ddiloco.observe import records
from ddiloco.protocol import actions, events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.runtime.delivery import Delivery, Leave, Notice, UpdateDelivery, WelcomeDelivery
from ddiloco.runtime.learner_arrays import Equipment, TrainingArrays
from ddiloco.runtime.shelf import Shelf
from ddiloco.runtime.transfer import Snapshot


class LearnerWorker:
    """One learner's thread; sole owner of its core and its arrays.

    Steps are handed to the devices ahead of their completion, at most `steps_in_flight` of them, so
    that the devices never wait for this thread; a step is reported once the devices have finished it.
    """

    def __init__(
        self,
        core: LearnerCore,
        equipment: Equipment,
        to_syncer: Callable[[events.SyncerEvent], None],
        record: Callable[[Any], None],
    ) -> None:
        self.core = core
        self.shelf = Shelf()
        self.inbox: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self.tokens = 0  # trained on so far; written by this thread alone
        self.failure: str | None = None
        self._equipment = equipment
        self._to_syncer = to_syncer
        self._record = record
        self._arrays = TrainingArrays(equipment)
        self._snapshots: dict[tuple[int, int], Snapshot] = {}  # (fragment, step)
        self._in_flight: collections.deque[tuple[int, int, dict[str, jax.Array]]] = collections.deque()
        self._leaving = False
        self._timeline = State.STARTING
        self._thread = threading.Thread(target=self._run, name=f"learner-{core.learner}", daemon=True)

    def start(self) -> None:
        """Starts the thread and asks the syncer to take part."""
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Waits for the thread to end; whether it did."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        learner = self.core.learner
        try:
            self._to_syncer(events.LearnerJoined(learner, self.core.incarnation))
            while not self._leaving:
                self._step_or_wait()
            self._finish_steps(leave=0)
            self._enter(State.FINISHED)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            self._enter(State.FAILED)
            self._record(records.LearnerDied(learner, time.time(), traceback.format_exc()))
            self._to_syncer(events.LearnerLost(learner, self.core.incarnation, self.failure))

    def _step_or_wait(self) -> None:
        """One pass: what has arrived, then a step if there may be one, else a wait for what arrives next."""
        self._take_deliveries(None)
        if self._leaving:
            return
        if not self.core.recovered:
            self._wait()
        elif self.core.done or self.core.blocked:
            self._finish_steps(leave=0)
            self._enter(State.FINISHED if self.core.done else State.WAITING_FOR_PEERS)
            self._wait()
        else:
            self._enter(State.STEPPING)
            started = time.monotonic()
            self._start_step()
            slowest = self._equipment.min_step_seconds
            self._finish_steps(leave=0 if slowest else self._equipment.steps_in_flight - 1)
            self._idle(started + slowest)

    def _wait(self) -> None:
        if not self._take_deliveries(self.core.policy.heartbeat):
            self._tell(events.Heartbeat())

    def _start_step(self) -> None:
        tokens, metrics = self._arrays.step(self.core.clock)
        self.tokens += tokens
        self._in_flight.append((self.core.clock + 1, tokens, metrics))
        self._tell(events.StepStarted(tokens))

    def _finish_steps(self, leave: int) -> None:
        """Waits until at most `leave` steps are with the devices, and reports those that are complete."""
        while self._in_flight and (len(self._in_flight) > leave or _complete(self._in_flight[0])):
            clock, tokens, metrics = self._in_flight.popleft()
            jax.block_until_ready(metrics)
            self._record(records.StepDone(self.core.learner, clock, time.time(), tokens, metrics))
            self._tell(events.StepFinished())

    def _idle(self, until: float) -> None:
        """Plays slower hardware: what arrives meanwhile is still taken at once."""
        while not self._leaving and (seconds := until - time.monotonic()) > 0:
            self._take_deliveries(seconds)

    def _take_deliveries(self, timeout: float | None) -> bool:
        """Handles all that has arrived, after waiting up to `timeout` seconds for it. Whether any had."""
        arrived = False
        while True:
            try:
                wait = timeout is not None and not arrived
                delivery = self.inbox.get(timeout=timeout) if wait else self.inbox.get_nowait()
            except queue.Empty:
                return arrived
            arrived = True
            match delivery:
                case WelcomeDelivery():
                    self._tell(delivery.event, fragments=delivery.fragments)
                case Notice():
                    self._tell(delivery.event)
                case UpdateDelivery():
                    self._tell(delivery.event, pieces=delivery.pieces)
                case Leave():
                    self._leaving = True

    def _tell(self, event: events.LearnerEvent, **arrays: Any) -> None:
        for action in self.core.handle(event, time.monotonic()):
            self._perform(action, **arrays)

    def _perform(self, action: actions.LearnerAction, fragments: Any = None, pieces: Any = None) -> None:
        core = self.core
        match action:
            case actions.Join():
                joined = events.LearnerJoined(core.learner, action.incarnation, action.step, action.versions)
                self._to_syncer(joined)
            case actions.Leave(reason=reason):
                raise RuntimeError(f"the syncer refused learner {core.learner}: {reason}")
            case actions.AdoptAll(step=step, versions=versions):
                self._arrays.adopt(fragments)
                self.shelf.clear()
                self._snapshots.clear()
                self._to_syncer(events.LearnerReady(core.learner, core.incarnation, step, versions))
            case actions.TakeSnapshot(contribution=c):
                self._snapshots[c.fragment, c.step] = self._arrays.snapshot(c.fragment)
            case actions.Publish(contribution=c):
                self.shelf.put(c, self._snapshots.pop((c.fragment, c.step)))
            case actions.ApplyUpdate(fragment=fragment, mixing=mixing):
                pulled = self.shelf.take_down(fragment)
                if pulled is not None:
                    self._arrays.pulled(fragment, pulled)
                self._arrays.apply(fragment, mixing, pieces)
            case actions.SendReport(report=report):
                self._to_syncer(events.StepReported(report))
            case actions.Drop(reason=reason):
                values = {"learner": core.learner, "reason": reason}
                self._record(records.Noted("drop", values, time.time()))

    def _enter(self, state: State) -> None:
        if state is not self._timeline:
            self._timeline = state
            self._record(records.StateChanged(self.core.learner, state, time.time()))


def _complete(step: tuple[int, int, dict[str, jax.Array]]) -> bool:
    return all(value.is_ready() for value in step[2].values())
