"""A learner's thread in mid-step: what it keeps to itself, and that it is heard all the same."""

import concurrent.futures
import contextlib
import dataclasses
import queue
import threading
import time
import types

import jax
import numpy as np
import pytest
from jax.experimental import io_callback

from ddiloco.outer.fragments import take
from ddiloco.protocol import events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import RoundId
from ddiloco.run.recipes import assembly_of
from ddiloco.workers import learner_worker
from ddiloco.workers.exchange import EventDelivery, InnerStateWanted, Leave
from ddiloco.workers.learner_arrays import TrainingArrays
from ddiloco.workers.learner_worker import LearnerWorker
from tests import workbench

TIMEOUT = 60.0
FOR_EVER = 1000.0  # seconds, against those of a test
pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def assembly(data_dir):
    sync = {"silence_timeout": 0.04}  # so that heartbeats come fast
    return assembly_of(workbench.experiment(data_dir, sync=sync))


class Core(LearnerCore):
    """Tells of each event that it gets."""

    def __init__(self, *settings):
        super().__init__(*settings)
        self.heard, self.started_at = queue.SimpleQueue(), []

    def handle(self, event, now):
        decided = super().handle(event, now)
        if isinstance(event, events.StepStarted):
            self.started_at.append(now)
        self.heard.put(event)
        return decided

    def hears(self, kind):
        """Waits for an event of the kind."""
        while not isinstance(self.heard.get(timeout=TIMEOUT), kind):
            pass


@contextlib.contextmanager
def stepping(assembly, **changes):
    """A welcomed worker whose equipment has these changes; its core; what it tells and offers the syncer."""
    e = assembly.experiment
    params = assembly.initial_parameters()
    fragments = [take(assembly.layout, p, params) for p in range(assembly.layout.num_fragments)]
    core, told = Core(0, 1, e.sync, e.train.steps), queue.SimpleQueue()
    equipment = dataclasses.replace(assembly.own_equipment(0), **changes)
    link = types.SimpleNamespace(waiting=0, send=lambda *offer: told.put(offer))
    say = lambda event, shard: told.put(event)  # noqa: E731
    worker = LearnerWorker(core, equipment, say, link, lambda record: None)
    worker.start()
    zeros = (0,) * len(fragments)
    worker.inbox.put(EventDelivery(events.Welcomed(1, 0, zeros, zeros), fragments))
    yield worker, core, told
    worker.inbox.put(Leave())
    assert worker.join(TIMEOUT)
    assert worker.failure is None


def steps_told(told):
    """The steps reported so far."""
    reports = []
    with contextlib.suppress(queue.Empty):
        while True:
            event = told.get_nowait()
            reports += [event.report.step] if isinstance(event, events.StepReported) else []
    return reports


def test_a_paced_step_is_reported_when_its_time_is_over(assembly):
    with stepping(assembly, min_step_seconds=FOR_EVER) as (worker, core, told):
        core.hears(events.StepStarted)
        answer = concurrent.futures.Future()
        worker.inbox.put(InnerStateWanted((), answer))
        assert answer.result(TIMEOUT).step == 1  # it hears what arrives
        assert 1 not in steps_told(told)
    assert steps_told(told)[-1] == 1


def test_a_paced_step_that_takes_long_has_heartbeats(assembly):
    with stepping(assembly, min_step_seconds=FOR_EVER) as (_, core, _):
        core.hears(events.StepStarted)
        for _ in range(3):
            core.hears(events.Heartbeat)


def offered(told):
    """The next offer, and the last step reported before it."""
    step = 0
    while not isinstance(event := told.get(timeout=TIMEOUT), tuple):
        step = event.report.step if isinstance(event, events.StepReported) else step
    return step, event


def test_what_it_is_asked_for_is_offered_once_as_of_the_step_and_after_its_report(assembly):
    with stepping(assembly) as (worker, _, told):
        for step, fragment in ((3, 1), (5, 0)):
            worker.inbox.put(EventDelivery(events.OfferAsked(RoundId(6, fragment), 0, step)))
            reported, (round_id, contribution, offer) = offered(told)
            assert reported == contribution.step >= step
            assert (round_id, contribution.fragment) == (RoundId(6, fragment), fragment)
            assert contribution.steps == contribution.step, "all of them on the version of the welcome"
            for ours, theirs in zip(offer.arrays, after(assembly, contribution.step, fragment), strict=True):
                np.testing.assert_array_equal(ours, theirs)
    while not told.empty():
        assert not isinstance(told.get(), tuple), "a second offer"


def after(assembly, steps, fragment):
    """The fragment after these steps by the same program on the same batches."""
    params = assembly.initial_parameters()
    arrays = TrainingArrays(assembly.own_equipment(0))
    arrays.adopt([take(assembly.layout, p, params) for p in range(assembly.layout.num_fragments)])
    for clock in range(steps):
        arrays.step(clock)
    return arrays.offer(fragment, steps).arrays


class Held:
    """A program whose steps wait on the device until they may end, from the one after `free` of them on."""

    def __init__(self, program, free=1):
        self.program, self.begun, self.may_end = program, threading.Event(), threading.Event()
        self._free = free

        def wait(loss):
            self.begun.set()
            assert self.may_end.wait(TIMEOUT)
            return np.asarray(loss)

        self._hold = jax.jit(lambda loss: io_callback(wait, jax.ShapeDtypeStruct((), np.float32), loss))

    def __getattr__(self, name):
        return getattr(self.program, name)

    def step(self, state, batch, clock):
        state, metrics = self.program.step(state, batch, clock)
        if clock < self._free:
            return state, metrics
        return state, {**metrics, "loss": self._hold(metrics["loss"])}


@pytest.mark.parametrize("free", [0, 1])
def test_a_step_that_the_devices_take_long_for_has_heartbeats(assembly, monkeypatch, free):
    monkeypatch.setattr(learner_worker, "HANGS", 1e9)
    program = Held(assembly.own_equipment(0).program, free)
    with stepping(assembly, program=program) as (_, core, told):
        assert program.begun.wait(TIMEOUT)
        for _ in range(3):
            core.hears(events.Heartbeat)
        assert max(steps_told(told)) == free
        program.may_end.set()
        core.hears(events.StepFinished)


def test_a_step_has_started_before_its_devices_are_at_it(assembly):
    program = Held(assembly.own_equipment(0).program, free=0)
    with stepping(assembly, program=program) as (_, core, _):
        assert program.begun.wait(TIMEOUT)
        under_way = time.monotonic()
        program.may_end.set()
        core.hears(events.StepFinished)
    assert core.started_at[0] < under_way
