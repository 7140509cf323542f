"""The inner optimizer's state given away and taken over: whose it is, of which boundary, and to the bit."""

import concurrent.futures
import gc
import json
import queue
import types
import weakref

import jax
import numpy as np
import pytest

from ddiloco.protocol import events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import NOTHING_MERGED, RoundId, Watermark
from ddiloco.run.recipes import assembly_of
from ddiloco.storage.learner_state import named, numbered, of_kind
from ddiloco.telemetry.records import Alarm
from ddiloco.training.program import TrainProgram
from ddiloco.workers.exchange import EventDelivery, InnerState, InnerStateWanted, Leave
from ddiloco.workers.learner_arrays import TrainingArrays
from ddiloco.workers.learner_worker import LearnerWorker
from tests import workbench

TIMEOUT = 60.0
pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def assembly(data_dir):
    return assembly_of(workbench.experiment(data_dir, train={"steps": 10_000}))


@pytest.fixture(scope="module")
def fragments(assembly):
    from ddiloco.outer.fragments import take

    params = assembly.initial_parameters()
    return [take(assembly.layout, p, params) for p in range(assembly.layout.num_fragments)]


def host(arrays):
    return [np.array(array) for array in arrays]


class Recovered:
    """Has a given inner state, and counts steps."""

    def __init__(self, state=None):
        self.state, self.asked, self.steps = state, [], queue.SimpleQueue()

    def inner_state(self, versions):
        self.asked.append(versions)
        return self.state

    def stepped(self):
        self.steps.put(1)


class Worker:
    """A learner's worker with a fresh stream of data, welcomed at version 0 of all fragments."""

    def __init__(self, assembly, fragments, recovery, send_offer=lambda *offer: None, data=NOTHING_MERGED):
        e = assembly.experiment
        core = LearnerCore(0, 1, e.sync, e.train.steps)
        self.told = []
        self.worker = LearnerWorker(
            core,
            assembly.own_equipment(0),
            lambda event, shard: None,
            types.SimpleNamespace(waiting=0, send=send_offer),
            self.told.append,
            recovery.inner_state,
            recovery.stepped,
        )
        self.inbox = self.worker.inbox
        self.fragments, self.data = fragments, data

    def __enter__(self):
        self.worker.start()
        zeros = (0,) * len(self.fragments)
        self.inbox.put(EventDelivery(events.Welcomed(1, 0, zeros, zeros, data=self.data), self.fragments))
        return self

    def __exit__(self, *_):
        self.inbox.put(Leave())
        assert self.worker.join(TIMEOUT)
        assert self.worker.failure is None

    def wish(self, versions=()):
        answer = concurrent.futures.Future()
        self.inbox.put(InnerStateWanted(versions, answer))
        return answer


def reference(assembly, fragments, steps, inner=None):
    """The inner state after so many steps from the fragments, taken alone."""
    arrays = TrainingArrays(assembly.own_equipment(0))
    arrays.adopt(fragments, inner)
    for clock in range(steps):
        arrays.step(clock)
    return host(arrays.inner())


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_welcome_holds_one_copy_of_parameters_and_state(assembly, fragments, monkeypatch):
    arrays = TrainingArrays(assembly.own_equipment(0))
    gc.collect()
    before, most = live_bytes(), []
    arrays.adopt(fragments)
    arrays.step(0)
    inner = host(arrays.inner())
    one = live_bytes() - before
    assert one > 3 * sum(assembly.layout.bytes)
    put = jax.device_put

    def counted(*arguments, **options):
        placed = put(*arguments, **options)
        most.append(live_bytes() - before)
        return placed

    monkeypatch.setattr(jax, "device_put", counted)
    arrays.adopt(fragments, inner)
    assert len(most) > len(inner)
    assert max(most) <= one


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


def test_a_donation_is_of_one_boundary_and_its_donor_steps_on(assembly, fragments):
    recovery = Recovered()
    with Worker(assembly, fragments, recovery) as worker:
        for _ in range(5):
            recovery.steps.get(timeout=TIMEOUT)
        first, second = worker.wish(), worker.wish()
        given = [wish.result(TIMEOUT) for wish in (first, second)]
        for _ in range(given[1].step + 3):
            recovery.steps.get(timeout=TIMEOUT)
    for state in given:
        assert state.step >= 5
        assert state.versions == (0,) * len(fragments)
        assert_same(host(state.arrays), reference(assembly, fragments, state.step))


def test_no_memory_for_a_copy_costs_the_copy_and_not_the_learner(assembly, fragments, monkeypatch):
    inner, calls = TrainingArrays.inner, []

    def copied(arrays):
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError("RESOURCE_EXHAUSTED: that much is not there")
        return inner(arrays)

    monkeypatch.setattr(TrainingArrays, "inner", copied)
    with Worker(assembly, fragments, Recovered()) as worker:
        with pytest.raises(MemoryError):
            worker.wish().result(TIMEOUT)
        given = worker.wish().result(TIMEOUT)
    assert len(calls) == 2
    assert_same(host(given.arrays), reference(assembly, fragments, given.step))
    [alarm] = [told.sentence for told in worker.told if isinstance(told, Alarm)]
    assert alarm.startswith("learner 0: no copy of the inner optimizer state: RESOURCE_EXHAUSTED")


def test_a_donation_waits_for_the_versions_asked_for(assembly, fragments):
    wanted = (0, 1, *(0,) * (len(fragments) - 2))
    with Worker(assembly, fragments, recovery := Recovered()) as worker:
        wish = worker.wish(wanted)
        for _ in range(4):
            recovery.steps.get(timeout=TIMEOUT)
        assert not wish.done()
        worker.inbox.put(EventDelivery(events.UpdateArrived(1, 1, 3), [fragments[1]]))
        state = wish.result(TIMEOUT)
    assert state.versions == wanted


def test_a_wish_that_cannot_come_true_ends_with_the_worker(assembly, fragments):
    with Worker(assembly, fragments, Recovered()) as worker:
        wish = worker.wish((99,) * len(fragments))
    assert wish.cancelled()


def test_a_learner_that_joins_goes_on_with_the_state_it_found(assembly, fragments):
    inner = reference(assembly, fragments, 3)
    zeros = (0,) * len(fragments)
    recovery = Recovered(InnerState(3, zeros, inner))
    with Worker(assembly, fragments, recovery) as worker:
        state = worker.wish().result(TIMEOUT)
    assert recovery.asked == [zeros]
    assert_same(host(state.arrays), reference(assembly, fragments, state.step, inner))
    if state.step:
        fresh = reference(assembly, fragments, state.step)
        assert any((one != other).any() for one, other in zip(host(state.arrays), fresh, strict=True))


def test_the_position_sent_with_an_offer_is_the_one_that_the_next_batch_comes_from(assembly, fragments):
    sent = queue.SimpleQueue()
    with Worker(assembly, fragments, recovery := Recovered(), lambda which, c, offer: sent.put(c)) as worker:
        for due in range(1, 4):
            worker.inbox.put(EventDelivery(events.OfferAsked(RoundId(due, 0), 0, due)))
            recovery.steps.get(timeout=TIMEOUT)
        offers = [sent.get(timeout=TIMEOUT) for _ in range(3)]
    equipment = assembly.own_equipment(0)
    drawn = [next(equipment.batches) for _ in range(max(c.upto.steps for c in offers) + 1)]
    for c in offers:
        fresh = assembly.own_equipment(0).batches
        fresh.set_state(json.loads(c.upto.position))
        assert_same(next(fresh).values(), drawn[c.upto.steps].values())


@pytest.mark.parametrize("sound", [True, False])
def test_a_new_process_draws_its_data_where_the_welcome_says_or_with_an_alarm_from_the_start(
    assembly, fragments, sound
):
    equipment, sent = assembly.own_equipment(0), queue.SimpleQueue()
    for _ in range(3):
        next(equipment.batches)
    position = equipment.batches.get_state()
    if not sound:
        position["stream"]["records"] += 1
    data = Watermark(0, 3, json.dumps(position))
    with Worker(assembly, fragments, Recovered(), lambda which, c, offer: sent.put(c), data) as worker:
        worker.inbox.put(EventDelivery(events.OfferAsked(RoundId(1, 0), 0, 1)))
        offer = sent.get(timeout=TIMEOUT)
    drawn = json.loads(offer.upto.position)["batches"]
    assert drawn == offer.upto.steps - (0 if sound else 3)
    assert any(isinstance(told, Alarm) for told in worker.told) is not sound


def test_a_saved_state_of_another_optimizer_is_told_in_a_line(assembly, fragments):
    learner = TrainingArrays(assembly.own_equipment(0))
    learner.adopt(fragments)
    arrays, values = learner.state()
    kept = {name: np.asarray(array) for name, array in arrays.items()}
    *inner, _ = numbered("inner", kept)
    others = named("params", of_kind("params", kept)) | named("inner", inner)
    told = r"of another version of ddiloco: it has \d+ arrays and \d+ numbers, not \d+ and \d+$"
    with pytest.raises(ValueError, match=told):
        TrainingArrays(assembly.own_equipment(0)).restore(others, values)


def test_the_devices_hold_one_state_while_another_is_restored(assembly, fragments, monkeypatch):
    learner = TrainingArrays(assembly.own_equipment(0))
    learner.adopt(fragments)
    arrays, values = learner.state()
    kept = {name: np.array(array) for name, array in arrays.items()}
    del arrays
    before = [weakref.ref(leaf) for leaf in jax.tree.leaves(learner.params)]
    gc.collect()
    assert all(ref() is not None for ref in before)
    there = []
    make = TrainProgram.state_from

    def state_from(program, *given):
        there.extend(ref() is not None for ref in before)
        return make(program, *given)

    monkeypatch.setattr(TrainProgram, "state_from", state_from)
    learner.restore(kept, values)
    assert there == [False] * len(before)
    assert_same(host(jax.tree.leaves(learner.params)), list(of_kind("params", kept).values()))
