"""A learner's thread: steps without a pause, offers fragments and applies updates, as its core decides."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import json
import math
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax

from ddiloco.data.errors import DataError
from ddiloco.goodput.accounting import State
from ddiloco.protocol import actions, events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.storage.learner_state import LearnerState, StateHeader
from ddiloco.storage.tape.recorder import LearnerTape
from ddiloco.telemetry import records
from ddiloco.training.step_meter import StepMeter
from ddiloco.workers.checkpointing import Checkpointing
from ddiloco.workers.device_calls import DeviceCalls
from ddiloco.workers.exchange import (
    BetweenSteps,
    EventDelivery,
    InnerState,
    InnerStateWanted,
    Leave,
    OfferPositions,
    Pieces,
    SnapshotBegun,
)
from ddiloco.workers.inbox import Inbox
from ddiloco.workers.learner_arrays import Equipment, Erred, TrainingArrays
from ddiloco.workers.resuming import ResumedLearner
from ddiloco.workers.snapshots.recording import LearnerRecording
from ddiloco.workers.transfer import Offer

HANGS = 10.0  # a step this many times as long as the longest before it sends no more heartbeats
Result = TypeVar("Result")


class Checkpoints(NamedTuple):
    """How a learner's state is kept."""

    keeper: Checkpointing
    about: Mapping[str, Any]  # what a StateHeader says of the run


class OfferLink(Protocol):
    """Takes a learner's offers to the syncer, one after the other."""

    @property
    def waiting(self) -> int:
        """How many it has not begun to send."""

    def send(self, round_id: RoundId, contribution: Contribution, offer: Offer) -> None:
        """Sends an offer; must not wait."""


class _Step(NamedTuple):
    """A step handed to the devices."""

    clock: int  # after it
    tokens: int
    metrics: dict[str, jax.Array]
    data_wait: float  # seconds until its batch was there

    @property
    def complete(self) -> bool:
        return all(value.is_ready() for value in self.metrics.values())


class LearnerWorker:
    """One learner's thread; sole owner of its core and its arrays.

    Up to `steps_in_flight` steps are handed to the devices at a time, so that these never wait for this
    thread; a step is reported once the devices have finished it. The core gets a heartbeat whenever the
    syncer has heard nothing for `core.heartbeat` seconds, in mid-step too, unless that step takes so much
    longer than those before it that the devices may hang.
    """

    def __init__(
        self,
        core: LearnerCore,
        equipment: Equipment,
        to_syncer: Callable[[events.SyncerEvent], None],
        offers: OfferLink,
        record: Callable[[Any], None],
        inner_state: Callable[[tuple[int, ...]], InnerState | None] = lambda versions: None,
        stepped: Callable[[], None] = lambda: None,
        tape: LearnerTape | None = None,
        recording: LearnerRecording | None = None,
        checkpoints: Checkpoints | None = None,
        resumed: ResumedLearner | None = None,
        make_arrays: Callable[[Equipment, Erred], TrainingArrays] = TrainingArrays,
    ) -> None:
        """`inner_state`: the one for a learner welcomed with these versions; may wait. None: a fresh one.
        `stepped` is called after each finished step.
        `tape`, `recording` and `checkpoints` are None if no tape is kept, no snapshots are taken and its
        state is not kept. `resumed`: the state of before with which the learner goes on; None: it joins.
        """
        self.core = core
        self.inbox = Inbox()
        self.tokens = 0  # trained on so far, steps under way too; written by this thread alone
        self.failure: str | None = None
        self.joining = threading.Event()  # set once the syncer knows that the learner joins or resumes
        self._equipment = equipment
        self._to_syncer, self._offers = to_syncer, offers
        self._record = record
        self._arrays = make_arrays(equipment, self._erred)
        devices = equipment.program.mesh.devices.flat
        self._meter = StepMeter(devices, equipment.step_flops, equipment.peak_flops)
        self._in_flight: collections.deque[_Step] = collections.deque()
        self._inner_state, self._stepped = inner_state, stepped
        self._positions = OfferPositions(core.policy.num_fragments)
        self._tape = tape or LearnerTape(core.learner, core.incarnation)
        self._recording, self._checkpoints = recording, checkpoints
        self._resumed = resumed
        self._trained = 0  # steps that the inner state has taken in
        if resumed is not None:
            self.tokens, self._trained = resumed.tokens, resumed.trained
        self._wanted: list[InnerStateWanted] = []
        self._leaving = False
        self._timeline = State.STARTING
        self._devices = DeviceCalls(f"devices-{core.learner}")
        self._heartbeat_at = 0.0  # by time.monotonic
        self._longest_step = 0.0  # seconds
        self._thread = threading.Thread(target=self._run, name=f"learner-{core.learner}", daemon=True)

    def start(self) -> None:
        """Starts the thread, which joins the run."""
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds for the thread to end; whether it did."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def boundary_seconds(self) -> float:
        """Until the devices have done the steps that they have now and one more, by the longest so far."""
        return (self._equipment.steps_in_flight + 1) * self._longest_step

    def between_steps(self, call: Callable[[], Result]) -> Result:
        """The result of `call`, which the learner's thread makes between two steps; for other threads.

        Where that thread has not begun or has ended, they make it themselves.
        """
        if not self._thread.is_alive():
            return call()
        wanted = BetweenSteps(call, concurrent.futures.Future())
        self.inbox.put(wanted)
        while not concurrent.futures.wait([wanted.answer], 0.2).done:
            if not self._thread.is_alive() and wanted.answer.cancel():
                return call()
        return wanted.answer.result()

    def _run(self) -> None:
        learner = self.core.learner
        self._devices.start()
        try:
            self._join()
            while not self._leaving:
                self._step_or_wait()
            self._finish_steps(leave=0)
            if self._checkpoints is not None:
                self._checkpoints.keeper.last(self._state if self.core.recovered else None)
            self._enter(State.FINISHED)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            self._enter(State.FAILED)
            self._record(records.LearnerDied(learner, time.time(), traceback.format_exc()))
            self._to_syncer(events.LearnerLost(learner, self.core.incarnation, self.failure))
        finally:
            for wish in self._wanted:
                wish.answer.cancel()
            self._devices.stop()
            self._tape.end()

    def _join(self) -> None:
        """Asks the syncer to join, or goes on with a state of before."""
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            self._tell(events.LearnerJoined(self.core.learner, self.core.incarnation))
            self.joining.set()
            return
        actions = self.core.resume(resumed.begins_with.work, resumed.begins_with.began)
        resumed.load(self._arrays, self.core.policy.mixing)
        self._positions.keep(self.core.work.steps, self._arrays.position())
        for action in actions:
            self._perform(action)
        self.joining.set()

    def _step_or_wait(self) -> None:
        """Handles what has arrived, then takes a step, or waits for the next delivery if it may not step."""
        self._take_deliveries(None)
        if self._leaving:
            return
        if self._checkpoints is not None and self.core.recovered and self._checkpoints.keeper.due:
            self._finish_steps(leave=0)  # what they skip must not be counted
            self._checkpoints.keeper.take(self._state)
        if not self.core.recovered:
            self._wait()
        elif self.core.done or self.core.blocked:
            self._finish_steps(leave=0)
            if not (self.core.done or self.core.blocked):  # all that it waited with was skipped
                return
            self._enter(State.FINISHED if self.core.done else State.WAITING_FOR_PEERS)
            self._wait()
        else:
            self._take_step()

    def _wait(self) -> None:
        self._take_deliveries(self._quiet_seconds())
        self._beat()

    def _take_step(self) -> None:
        self._enter(State.STEPPING)
        started, slowest = time.monotonic(), self._equipment.min_step_seconds
        self._start_step()
        self._idle(started + slowest)
        if self._finish_steps(leave=0 if slowest else self._equipment.steps_in_flight - 1):
            self._longest_step = max(self._longest_step, time.monotonic() - started)

    def _start_step(self) -> None:
        clock = self.core.clock
        tokens, metrics = self._patiently(lambda: self._arrays.step(clock))
        self.tokens += tokens
        self._trained += 1
        wait = self._arrays.data_wait
        self._in_flight.append(_Step(self.core.clock + 1, tokens, metrics, wait))
        self._handle(events.StepStarted(tokens, self._offers.waiting))

    def _idle(self, until: float) -> None:
        """Imitates slower devices: the step is still under way, and what arrives is handled at once."""
        while not self._leaving and (seconds := until - time.monotonic()) > 0:
            self._take_deliveries(min(seconds, self._quiet_seconds()))
            self._beat()

    def _finish_steps(self, leave: int) -> bool:
        """Waits until the devices have at most `leave` steps left, and reports those that are complete.

        Returns whether there were any.
        """
        before = len(self._in_flight)
        while self._in_flight and (len(self._in_flight) > leave or self._in_flight[0].complete):
            step = self._in_flight[0]
            if not step.complete:
                self._patiently(lambda metrics=step.metrics: jax.block_until_ready(metrics))
            self._in_flight.popleft()
            self._stepped()
            metrics = {**step.metrics, **self._meter.finished(step.data_wait)}
            done = records.StepDone(self.core.learner, step.clock, time.time(), step.tokens, metrics)
            self.tokens += done.tokens - step.tokens  # without those of a skipped step
            self._record(done)
            self._handle(events.StepFinished(done.skipped))
        return len(self._in_flight) < before

    def _patiently(self, call: Callable[[], Result]) -> Result:
        """The result of a call that may wait for the devices, with heartbeats meanwhile."""
        hangs_at = time.monotonic() + HANGS * (self._longest_step or self.core.policy.silence_timeout)
        return self._devices.wait(call, self._quiet_seconds, lambda: self._beat(hangs_at))

    def _tell(self, event: events.SyncerEvent) -> None:
        self._to_syncer(event)
        self._heartbeat_at = time.monotonic() + self.core.heartbeat

    def _quiet_seconds(self) -> float:
        """Until the next heartbeat."""
        return max(0.0, self._heartbeat_at - time.monotonic())

    def _beat(self, hangs_at: float = math.inf) -> None:
        now = time.monotonic()
        if now < self._heartbeat_at:
            return
        if now < hangs_at:
            self._handle(events.Heartbeat())
        self._heartbeat_at = now + self.core.heartbeat

    def _take_deliveries(self, timeout: float | None) -> bool:
        """Handles all that has arrived, after waiting up to `timeout` seconds; whether anything had."""
        arrived = False
        while True:
            try:
                wait = timeout is not None and not arrived
                delivery = self.inbox.get(timeout if wait else 0.0)
            except queue.Empty:
                self._donate()
                return arrived
            arrived = True
            match delivery:
                case SnapshotBegun():
                    self._record_state(delivery.number)
                case EventDelivery():
                    self._record_state(delivery.epoch)
                    self._handle(delivery.event, delivery.fragments)
                case InnerStateWanted():
                    self._wanted.append(delivery)
                case BetweenSteps():
                    self._patiently(delivery.make)
                case Leave():
                    self._leaving = True

    def _record_state(self, number: int) -> None:
        """Records the state for this snapshot, if that is not done; does not wait for steps.

        Counters and arrays are both those after the last step handed out.
        """
        if self._recording is None or not self._recording.sees(number):
            return
        state = {"time": time.time(), "tokens": self.tokens}
        self._recording.record(self.core, self._arrays.state, state)

    def _state(self) -> LearnerState:
        """The whole state, with no step under way."""
        arrays, values = self._arrays.state()
        origin = self._tape.gave() if self._tape.on else None
        about = StateHeader(
            **self._checkpoints.about,
            work=self.core.work,
            position=values["position"],
            trained=self._trained,
            tokens=self.tokens,
            steps=values["steps"],
            origin=None if origin is None else dataclasses.astuple(origin),
        )
        return LearnerState(about, arrays)

    def _donate(self) -> None:
        """Gives a copy of the inner state to everyone whose versions are applied; does not wait for steps."""
        if not self._wanted or not self.core.recovered:
            return
        own = self.core.versions
        ready = [w for w in self._wanted if all(a >= b for a, b in zip(own, w.versions, strict=False))]
        self._wanted = [w for w in self._wanted if w not in ready and not w.answer.cancelled()]
        ready = [w for w in ready if w.answer.set_running_or_notify_cancel()]
        if not ready:
            return
        try:
            arrays = self._arrays.inner()
        except Exception as error:  # such as no memory for it: that costs the copy, and not the learner
            problem = f"no copy of the inner optimizer state: {records.reason(error)}"
            self._record(records.Alarm(f"learner {self.core.learner}: {problem}", time.time()))
            for wish in ready:
                wish.answer.set_exception(error)
            return
        state = InnerState(self.core.clock, own, arrays, self._tape.gave(), self._trained)
        for wish in ready:
            wish.answer.set_result(state)

    def _handle(self, event: events.LearnerEvent, fragments: Sequence[Pieces] = ()) -> None:
        now = time.monotonic()
        decided = self.core.handle(event, now)
        self._tape.heard(event, now)
        for action in decided:
            self._perform(action, fragments)

    def _perform(self, action: actions.LearnerAction, fragments: Sequence[Pieces] = ()) -> None:
        core = self.core
        match action:
            case actions.TellSyncer(event):
                self._tell(event)
            case actions.Leave(reason=reason):
                raise RuntimeError(f"the syncer refused learner {core.learner}: {reason}")
            case actions.AdoptAll(versions=versions, position=position):
                if self._timeline is State.STEPPING:  # whoever waits for an inner state takes no step
                    self._enter(State.RECONFIGURING)
                inner = self._inner_state(versions)
                self._tape.adopted(inner is None, inner.origin if inner is not None else None)
                self._arrays.adopt(fragments, inner.arrays if inner is not None else None)
                self._trained = inner.trained if inner is not None else 0
                if position is not None:
                    self._draw_from(position)
            case actions.DrawFrom(position):
                self._draw_from(position)
            case actions.MakeOffer(contribution=c):
                self._arrays.offer(c.fragment, c.upto.steps)
                self._positions.keep(c.upto.steps, self._arrays.position())
            case actions.SendOffer(round_id, c):
                offer = self._arrays.offered(c.fragment, c.upto.steps)
                self._offers.send(round_id, self._positions.sent(c), offer)
            case actions.ApplyUpdate():
                [pieces] = fragments
                self._arrays.apply(action.fragment, action.mixing, pieces, action.merged, action.rebase)
            case actions.Drop(reason=reason):
                values = {"learner": core.learner, "reason": reason}
                self._record(records.Noted("drop", values, time.time()))

    def _draw_from(self, position: str) -> None:
        """Has the data go on there; where they cannot, they begin again, which must not kill the learner."""
        try:
            self._arrays.draw_from(json.loads(position) if position else None)
        except (DataError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            problem = f"its data begin again: {records.reason(error)}"
            self._record(records.Alarm(f"learner {self.core.learner}: {problem}", time.time()))
            self._arrays.draw_from(None)

    def _erred(self, step: int, devices: list[str]) -> None:
        for found in records.corruption(self.core.learner, step, devices, time.time()):
            self._record(found)

    def _enter(self, state: State) -> None:
        if state is not self._timeline:
            self._timeline = state
            self._meter.interrupted()
            self._record(records.StateChanged(self.core.learner, state, time.time()))
