"""Random schedules with the arrays that learners ship: what is merged of a learner is exactly what it did."""

import collections
import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddiloco.outer.fragments import fragment
from ddiloco.protocol import events
from ddiloco.remote.learner.host_arrays import HostArrays, LeadingArrays
from ddiloco.training.step import TrainState
from ddiloco.virtual import fleet
from ddiloco.virtual.learner_process import VirtualLearner
from ddiloco.workers.exchange import EventDelivery, fragments_with
from ddiloco.workers.learner_arrays import Equipment, TrainingArrays
from ddiloco.workers.transfer import FragmentTransfer
from experiments.studies.schedules import conditions
from experiments.studies.schedules.integers import IntegerLearner, of_fragment
from experiments.studies.schedules.random_schedule import explore
from tests.long import times
from tests.remote.host_ends import Alone

MESH = Mesh(np.array(jax.devices()[:1]), ("data",))
ON_DEVICE = NamedSharding(MESH, PartitionSpec())
WIDTH = 2
APPLIED = collections.Counter()  # updates, by what they keep of a learner's work


class Program:
    """Makes and copies states of parameters alone."""

    mesh = MESH

    def __init__(self, layout):
        self._layout = layout

    def zeros(self):
        return {self._layout.names(p)[0]: np.zeros(WIDTH) for p in range(self._layout.num_fragments)}

    def state_of(self, params, inner):
        return self.state_from(params)

    def state_from(self, params, inner=None):
        return TrainState({name: jax.device_put(np.asarray(x), ON_DEVICE) for name, x in params.items()}, ())

    def copy(self, state):
        return TrainState({name: value + 0 for name, value in state.params.items()}, ())


class Batches:
    """Counted elsewhere."""

    def get_state(self):
        return {}

    def set_state(self, state):
        pass


@functools.cache
def transfer_of(num_fragments):
    shapes = {f"tensor{p}": (WIDTH,) for p in range(num_fragments)}
    return FragmentTransfer(fragment(shapes, num_fragments), dict.fromkeys(shapes, ON_DEVICE), rebase=True)


class ShippedLearner(IntegerLearner):
    """The same integers, in float32 on a device: their sums are exact below 2 to the power of 24."""

    def __init__(self, *about):
        super().__init__(*about)
        self._hosts, self._names = (), []  # the arrays of each of its hosts; the first has the others follow

    def _begin(self, num_fragments):
        transfer = transfer_of(num_fragments)
        self._names = [transfer._layout.names(p)[0] for p in range(num_fragments)]
        self._hosts = self._made(Equipment(Program(transfer._layout), transfer, Batches()))

    def _made(self, equipment):
        return (TrainingArrays(equipment),)

    def parameters(self, versions):
        theta = [{int(x) for host in self._hosts if host.params for x in host.params[p]} for p in self._names]
        assert all(len(values) <= 1 for values in theta), "hosts have the same"
        found = [value for values in theta for value in values]
        assert all(abs(value) < 1 << 24 for value in found)
        return super().parameters(versions)._replace(theta=found)

    def adopt(self, fragments, inner=None):
        if not self._hosts:
            self._begin(len(fragments))
        self._hosts[0].adopt([self._pieces(value) for value in fragments])

    def _pieces(self, value):
        return (np.full(WIDTH, *value, np.float32),)

    def step(self, clock):
        done = super().step(clock)
        for host in self._hosts:
            for p, name in enumerate(self._names):
                host.params[name] = host.params[name] + np.float32(of_fragment(p, self.moved))
        return done

    def offer(self, fragment, steps):
        self._hosts[0].offer(fragment, steps)

    def offered(self, fragment, steps):
        sent = {int(x) for host in self._hosts for x in host.offered(fragment, steps).on_host()[0]}
        assert len(sent) == 1, "hosts have the same"
        return tuple(sent)

    def apply(self, fragment, mixing, payload, merged=None, rebase=False):
        APPLIED["nothing" if not rebase else "all" if merged is None else "what came after an offer"] += 1
        self._hosts[0].apply(fragment, mixing, self._pieces(payload), merged, rebase)

    def state(self):
        arrays, values = self._hosts[0].state()
        return (len(self._names), values, [arrays, *self._copies(arrays)]), self.drawn

    def _copies(self, arrays):
        return ()

    def restore(self, arrays, values):
        num_fragments, kept, copies = arrays
        self._begin(num_fragments)
        for host, copy in zip(self._hosts, copies, strict=True):
            host.restore(copy, kept)
        self.drawn = values

    def lose(self):
        for host in self._hosts:
            host.lose()


class HostedLearner(ShippedLearner):
    """A learner of two hosts, of which the second follows the first's orders."""

    core = None  # of its process

    def _made(self, equipment):
        self._follower = Alone(HostArrays(equipment, None))
        return LeadingArrays(equipment, None, self.core, self._follower), self._follower.arrays

    def arrived(self, event, fragments):
        """The second host's blocks of fragments: before the first's are applied, or never are."""
        if not self._hosts:
            self._begin(self.core.policy.num_fragments)
        if isinstance(event, events.Welcomed):
            lineages = event.lineages or (0,) * len(fragments)
            event = dataclasses.replace(event, fragments=tuple(fragments_with(event)), lineages=lineages)
        self._follower.deliver(EventDelivery(event, [self._pieces(value) for value in fragments]))

    def _copies(self, arrays):
        return (self._follower.copies()[arrays.number],)


class HostedProcess(VirtualLearner):
    """A process of such a learner."""

    def __init__(self, core, place, arrays, *parts):
        arrays.core = core
        super().__init__(core, place, arrays, *parts)

    def take(self, event, fragments=()):
        if self.alive and fragments:
            self.arrays.arrived(event, fragments)
        super().take(event, fragments)


def with_two_hosts(patch):
    patch.setattr(conditions, "IntegerLearner", HostedLearner)
    patch.setattr(fleet, "VirtualLearner", HostedProcess)


@pytest.mark.parametrize("first", [0, pytest.param(29, marks=pytest.mark.slow)])
@pytest.mark.parametrize("hosts", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_is_merged_of_a_learner_is_what_its_steps_have_added(first, hosts, monkeypatch):
    """With crashes, returns from checkpoints, older disks and shards; `ledger.py` has the rules."""
    monkeypatch.setattr(conditions, "IntegerLearner", ShippedLearner)
    if hosts == 2:
        with_two_hosts(monkeypatch)
    APPLIED.clear()
    for seed in range(first, first + times(10, 60)):
        explore(seed)
    assert len(APPLIED) == 3 and min(APPLIED.values()) > 10
