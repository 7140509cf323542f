"""A learner's thread: steps its actor without a pause, and passes it arriving messages, with the time."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import math
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax

from ddiloco.goodput.accounting import State
from ddiloco.protocol import events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.storage.learner_state import LearnerState, StateHeader
from ddiloco.storage.tape.recorder import LearnerTape
from ddiloco.telemetry import records
from ddiloco.training.step_meter import StepMeter
from ddiloco.workers.checkpointing import Checkpointing
from ddiloco.workers.exchange import (
    BetweenSteps,
    CheckpointAsked,
    EventDelivery,
    InnerState,
    InnerStateWanted,
    Leave,
    Pieces,
)
from ddiloco.workers.inbox import Inbox
from ddiloco.workers.learner_actor import LearnerActor
from ddiloco.workers.learner_arrays import STEPS_IN_FLIGHT, Equipment, Erred, TrainingArrays
from ddiloco.workers.resuming import ResumedLearner
from ddiloco.workers.transfer import Offer

MAX_CORRUPT_STEPS = 3  # verified steps of a process that give other bits, with which it fails
HANGS = 10.0  # a step this many times as long as the longest before it sends no more heartbeats
Result = TypeVar("Result")


class CorruptionError(Exception):
    """The devices compute wrong."""


class Checkpoints(NamedTuple):
    """Writes a learner's checkpoints."""

    keeper: Checkpointing
    about: Mapping[str, Any]  # the run's fields of a StateHeader


class OfferLink(Protocol):
    """Sends a learner's offers to the syncer, in order."""

    @property
    def waiting(self) -> int:
        """Number of offers not yet begun to be sent."""

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
        return all(value.is_ready() for value in self.metrics.values() if isinstance(value, jax.Array))


class LearnerWorker:
    """One learner's thread; sole owner of its actor.

    Up to STEPS_IN_FLIGHT steps are dispatched to the devices, so that they never wait for this thread; a
    step is reported once the devices have finished it. The core gets a heartbeat after `core.heartbeat`
    seconds without a message to the syncer, in mid-step too, unless that step takes so much longer than
    earlier ones that the devices may hang.
    """

    def __init__(
        self,
        core: LearnerCore,
        equipment: Equipment,
        to_syncer: Callable[[events.FromLearner, int], None],
        offers: OfferLink,
        record: Callable[[Any], None],
        inner_state: Callable[[tuple[int, ...]], InnerState | None] = lambda versions: None,
        stepped: Callable[[], None] = lambda: None,
        tape: LearnerTape | None = None,
        checkpoints: Checkpoints | None = None,
        resumed: ResumedLearner | None = None,
        make_arrays: Callable[[Equipment, Erred], TrainingArrays] = TrainingArrays,
    ) -> None:
        """`to_syncer`: sends an event to a shard of the syncer.

        `inner_state`: for a learner welcomed with these versions; may wait. None: a fresh one. `stepped` is
        called after each finished step. `tape` and `checkpoints`: None for none. `resumed`: the state to
        resume; None: the learner joins.
        """
        self.inbox = Inbox()
        self.tokens = 0  # trained on so far, steps under way too; written by this thread alone
        self.failure: str | None = None
        self.corrupt_steps = 0  # verified steps that gave other bits as they were computed again
        self.joining = threading.Event()  # set once the syncer knows that the learner joins or resumes
        self._equipment = equipment
        self._to_syncer, self._offers = to_syncer, offers
        self._record = record
        trained = 0 if resumed is None else resumed.trained
        self._actor = LearnerActor(core, make_arrays(equipment, self._erred), self, trained)
        devices = equipment.program.mesh.devices.flat
        self._meter = StepMeter(devices, equipment.step_flops, equipment.peak_flops)
        self._in_flight: collections.deque[_Step] = collections.deque()
        self._inner_state, self._stepped = inner_state, stepped
        self._tape = tape or LearnerTape(core.learner, core.incarnation)
        self._checkpoints = checkpoints
        self._resumed = resumed
        if resumed is not None:
            self.tokens = resumed.tokens
        self._wanted: list[InnerStateWanted] = []
        self._leaving = self._comes_back = False
        self._timeline = State.STARTING
        self._devices = DeviceCalls(f"devices-{core.learner}")
        self._heartbeat_at = 0.0  # by time.monotonic
        self._longest_step = 0.0  # seconds
        self._thread = threading.Thread(target=self._run, name=f"learner-{core.learner}", daemon=True)

    @property
    def core(self) -> LearnerCore:
        """The core; only the thread may change it."""
        return self._actor.core

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
        return (STEPS_IN_FLIGHT + 1) * self._longest_step

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
            self._enter(State.RECONFIGURING if self._comes_back else State.FINISHED)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            self._enter(State.FAILED)
            self._record(records.LearnerDied(learner, time.time(), traceback.format_exc()))
            for shard, incarnation in enumerate(self.core.incarnations):
                self._to_syncer(events.LearnerLost(learner, incarnation, self.failure), shard)
        finally:
            for wish in self._wanted:
                wish.answer.cancel()
            self._devices.stop()
            self._tape.end()

    def _join(self) -> None:
        """Joins the syncer, or resumes an earlier state."""
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            self._actor.join()
        else:
            began = resumed.begins_with
            resumed.load(self._actor.arrays)
            self._actor.perform(self._actor.resume(began.work, began.began))
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
        if self._finish_steps(leave=0 if slowest else STEPS_IN_FLIGHT - 1):
            self._longest_step = max(self._longest_step, time.monotonic() - started)

    def _start_step(self) -> None:
        began = time.monotonic()  # CPU devices take the step within the call
        tokens, metrics = self._patiently(self._actor.step)
        self.tokens += tokens
        wait = self._actor.arrays.data_wait
        self._in_flight.append(_Step(self.core.clock + 1, tokens, metrics, wait))
        self._actor.handle(events.StepStarted(tokens, self._offers.waiting), began)

    def _idle(self, until: float) -> None:
        """Imitates slower devices: the step is still under way, and what arrives is handled at once."""
        while not self._leaving and (seconds := until - time.monotonic()) > 0:
            self._take_deliveries(min(seconds, self._quiet_seconds()))
            self._beat()

    def _finish_steps(self, leave: int) -> bool:
        """Waits until at most `leave` steps are in flight, and reports the complete ones.

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
                case CheckpointAsked():
                    if self._checkpoints is not None:
                        self._checkpoints.keeper.ask(delivery.number)
                case EventDelivery():
                    self._handle(delivery.event, delivery.fragments)
                case InnerStateWanted():
                    self._wanted.append(delivery)
                case BetweenSteps():
                    self._patiently(delivery.make)
                case Leave(comes_back=comes_back):
                    self._leaving, self._comes_back = True, comes_back

    def _state(self) -> LearnerState:
        """The whole state, with no step under way."""
        arrays, values = self._actor.arrays.state()
        origin = self._tape.gave() if self._tape.on else None
        about = StateHeader(
            **self._checkpoints.about,
            work=self.core.work,
            position=values["position"],
            trained=self._actor.trained,
            tokens=self.tokens,
            steps=values["steps"],
            origin=None if origin is None else dataclasses.astuple(origin),
            time=time.time(),
        )
        return LearnerState(about, arrays)

    def _donate(self) -> None:
        """Gives copies of the inner state to peers whose versions are applied; does not wait for steps."""
        if not self._wanted or not self.core.recovered:
            return
        own = self.core.versions
        ready = [w for w in self._wanted if all(a >= b for a, b in zip(own, w.versions, strict=False))]
        self._wanted = [w for w in self._wanted if w not in ready and not w.answer.cancelled()]
        ready = [w for w in ready if w.answer.set_running_or_notify_cancel()]
        if not ready:
            return
        try:
            arrays = self._actor.arrays.inner()
        except Exception as error:  # such as no memory for it: that costs the copy, and not the learner
            self.alarm(f"no copy of the inner optimizer state: {records.reason(error)}")
            for wish in ready:
                wish.answer.set_exception(error)
            return
        state = InnerState(self.core.clock, own, arrays, self._tape.gave(), self._actor.trained)
        for wish in ready:
            wish.answer.set_result(state)

    def _handle(self, event: events.LearnerEvent, fragments: Sequence[Pieces] = ()) -> None:
        self._actor.handle(event, time.monotonic(), fragments)

    # As the driver of its actor.

    def handled(self, event: events.LearnerEvent, decided: Sequence[Any], now: float) -> None:
        self._tape.heard(event, now)

    def send(self, event: events.FromLearner, shard: int) -> None:
        self._to_syncer(event, shard)
        self._heartbeat_at = time.monotonic() + self.core.heartbeat

    def send_offer(self, offer: events.FragmentArrived, arrays: Offer) -> None:
        self._offers.send(offer.round, offer.contribution, arrays)

    def inner_state(self, versions: tuple[int, ...]) -> InnerState | None:
        if self._timeline is State.STEPPING:  # a learner that waits for an inner state takes no step
            self._enter(State.RECONFIGURING)
        inner = self._inner_state(versions)
        self._tape.adopted(inner is None, inner.origin if inner is not None else None)
        return inner

    def record(self, name: str, values: Mapping[str, Any]) -> None:
        self._record(records.Noted(name, dict(values), time.time()))

    def alarm(self, problem: str) -> None:
        self._record(records.Alarm(f"learner {self.core.learner}: {problem}", time.time()))

    def leave(self, why: str) -> None:
        raise RuntimeError(f"the syncer refused learner {self.core.learner}: {why}")

    def _erred(self, step: int, devices: list[str]) -> None:
        if devices:  # else they are another host's, which sends them
            for found in records.corruption(self.core.learner, step, devices, time.time()):
                self._record(found)
        self.corrupt_steps += 1
        if self.corrupt_steps == MAX_CORRUPT_STEPS:
            raise CorruptionError(f"{MAX_CORRUPT_STEPS} verified steps gave other bits: the hardware errs")

    def _enter(self, state: State) -> None:
        if state is not self._timeline:
            self._timeline = state
            self._meter.interrupted()
            self._record(records.StateChanged(self.core.learner, state, time.time()))


class DeviceCalls:
    """Makes calls in order that may wait for the devices, for a thread that stays responsive.

    Its thread is a daemon: if a device never answers, the process can still end.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None]
        self._calls = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the call under way; does not wait for that."""
        self._calls.put(None)

    def wait(
        self, call: Callable[[], Result], seconds: Callable[[], float], meanwhile: Callable[[], None]
    ) -> Result:
        """The result of `call`, or its exception.

        Until then it waits for `seconds()`, calls `meanwhile`, and waits again.
        """
        answer: concurrent.futures.Future[Result] = concurrent.futures.Future()
        self._calls.put((answer, call))
        while not concurrent.futures.wait([answer], seconds()).done:
            meanwhile()
        return answer.result()

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None:
            answer, call = asked
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)
