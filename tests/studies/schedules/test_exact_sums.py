"""Random schedules with the arrays that learners ship: what is merged of a learner is exactly what it did."""

import collections
import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddiloco.outer.fragments import fragment
from ddiloco.training.step import TrainState
from ddiloco.workers.learner_arrays import Equipment, TrainingArrays
from ddiloco.workers.transfer import FragmentTransfer
from experiments.studies.schedules import conditions
from experiments.studies.schedules.integers import IntegerLearner, of_fragment
from experiments.studies.schedules.random_schedule import explore
from tests.long import times

MESH = Mesh(np.array(jax.devices()[:1]), ("data",))
ON_DEVICE = NamedSharding(MESH, PartitionSpec())
WIDTH = 2
APPLIED = collections.Counter()  # updates, by what they keep of a learner's work


class Program:
    """Makes and copies states of parameters alone."""

    mesh = MESH

    def state_from(self, params, inner=None):
        return TrainState({name: jax.device_put(np.asarray(x), ON_DEVICE) for name, x in params.items()}, ())

    def copy(self, state):
        return TrainState({name: value + 0 for name, value in state.params.items()}, ())


class Batches:
    """Counted elsewhere."""

    def get_state(self):
        return {}


@functools.cache
def transfer_of(num_fragments):
    shapes = {f"tensor{p}": (WIDTH,) for p in range(num_fragments)}
    return FragmentTransfer(fragment(shapes, num_fragments), dict.fromkeys(shapes, ON_DEVICE), rebase=True)


class ShippedLearner(IntegerLearner):
    """The same integers, in float32 on a device: their sums are exact below 2 to the power of 24."""

    def __init__(self, *about):
        super().__init__(*about)
        self._arrays = self._names = None

    def _of(self, num_fragments):
        transfer = transfer_of(num_fragments)
        self._names = [transfer._layout.names(p)[0] for p in range(num_fragments)]
        self._arrays = TrainingArrays(Equipment(Program(), transfer, Batches()))

    def parameters(self, versions):
        params = {} if self._arrays is None else self._arrays.params
        theta = [[*map(int, params[name])] for name in self._names or () if params]
        assert all(len({*values}) == 1 for values in theta) and all(abs(v[0]) < 1 << 24 for v in theta)
        return super().parameters(versions)._replace(theta=[values[0] for values in theta])

    def adopt(self, fragments, inner=None):
        self._of(len(fragments))
        self._arrays.adopt([self._pieces(value) for value in fragments])

    def _pieces(self, value):
        return (np.full(WIDTH, *value, np.float32),)

    def step(self, clock):
        done = super().step(clock)
        params = self._arrays.params
        for p, name in enumerate(self._names):
            params[name] = params[name] + np.float32(of_fragment(p, self.moved))
        return done

    def offer(self, fragment, steps):
        self._arrays.offer(fragment, steps)

    def offered(self, fragment, steps):
        [sent] = self._arrays.offered(fragment, steps).on_host()
        return (int(sent[0]),)

    def apply(self, fragment, mixing, payload, merged=None, rebase=False):
        APPLIED["nothing" if not rebase else "all" if merged is None else "what came after an offer"] += 1
        self._arrays.apply(fragment, mixing, self._pieces(payload), merged, rebase)

    def state(self):
        return (len(self._names), *self._arrays.state()), self.drawn

    def restore(self, arrays, values):
        num_fragments, kept, more = arrays
        self._of(num_fragments)
        self._arrays._equipment.batches.set_state = lambda state: None
        self._arrays.restore(kept, more)
        self.drawn = values

    def lose(self):
        if self._arrays is not None:
            self._arrays.lose()


@pytest.mark.parametrize("first", [0, pytest.param(29, marks=pytest.mark.slow)])
def test_what_is_merged_of_a_learner_is_what_its_steps_have_added(first, monkeypatch):
    """With crashes, returns from checkpoints, older disks and shards; `ledger.py` has the rules."""
    monkeypatch.setattr(conditions, "IntegerLearner", ShippedLearner)
    APPLIED.clear()
    for seed in range(first, first + times(10, 60)):
        explore(seed)
    assert len(APPLIED) == 3 and min(APPLIED.values()) > 10
