"""Where a run's parts come from: what a loop of one's own may be asked for, and what not."""

import dataclasses
import functools
import itertools
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ddiloco.config import ConfigError
from ddiloco.data.errors import DataError
from ddiloco.data.shards import reshard
from ddiloco.run.recipes import assembly_of, load_factory
from ddiloco.settings.experiment import parse, to_json
from ddiloco.training.loop import Place
from experiments.examples import plain_loop
from tests import workbench
from tests.refusals import refusal

pytestmark = pytest.mark.usefixtures("one_device")
MODEL = {"name": "loop", "factory": "experiments.examples.plain_loop:make_loop", "settings": {"width": 4}}


def experiment(**changes):
    return parse({"model": MODEL, "sync": {"num_learners": 2, "num_fragments": 2}, **changes})


def test_the_settings_of_a_loop_come_back_from_json():
    e = experiment(seed=3)
    assert parse(to_json(e)) == e
    assert e.model.settings == {"width": 4}


def test_every_learner_has_a_loop_of_its_own_and_all_begin_with_the_same_parameters():
    assembly = assembly_of(experiment())
    one, other = assembly.equipment()
    assert one.program is not other.program
    first, second = next(one.batches)["x"], next(other.batches)["x"]
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(next(assembly.batches((1,)))["x"], second)  # from their beginning
    initial, own = assembly.initial_parameters(), one.program.initial_parameters()
    assert all(np.array_equal(initial[name], own[name]) for name in initial)


def test_a_loop_may_lay_its_batches_on_the_learners_own_devices(monkeypatch):
    def make_loop(place, width):
        loop, rows = plain_loop.make_loop(place, width), NamedSharding(place.mesh, PartitionSpec("data"))
        whole = NamedSharding(place.mesh, PartitionSpec())
        return dataclasses.replace(
            loop,
            init=lambda: jax.device_put(loop.init(), whole),
            batches=lambda: (jax.device_put(batch, rows) for batch in loop.batches()),
        )

    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:4])
    for parts in assembly_of(experiment(), make_loop).equipment():
        batch, program = next(parts.batches), parts.program
        assert batch["x"].devices() == set(program.mesh.devices.flat)
        _, metrics = program.step(program.state_from(program.initial_parameters()), batch, 0)
        assert np.isfinite(metrics["loss"])


def test_learners_whose_parameters_differ_from_the_syncers_are_told():
    def make_loop(place, width):
        return plain_loop.make_loop(place, width + place.learner)

    with pytest.raises(ConfigError) as raised:
        assembly_of(experiment(), make_loop).check()
    told = "loop.params: learner 1 has hidden/b of shape (5,), the syncer of (4,)"
    assert str(raised.value).startswith(told)


def test_a_factory_that_does_not_say_what_it_takes_is_called_as_it_is():
    mesh = assembly_of(experiment()).own_mesh()
    loop = plain_loop.make_loop(Place(0, 2, 0, mesh), 4)
    silent = functools.partial(next, itertools.repeat(loop))  # which has the place as `next`'s default
    assembly = assembly_of(experiment(model={**MODEL, "settings": {}}), silent)
    assert assembly.initial_parameters().keys() == assembly_of(experiment()).initial_parameters().keys()


def test_a_loop_without_evaluation_scores_nothing():
    def make_loop(place, width):
        return dataclasses.replace(plain_loop.make_loop(place, width), evaluate=None)

    assembly = assembly_of(experiment(), make_loop)
    assert assembly.scorer(assembly.own_mesh())(assembly.initial_parameters()) is None


def test_a_loop_that_begins_with_numbers_that_are_not_finite_is_refused():
    def make_loop(place, width):
        loop = plain_loop.make_loop(place, width)

        def init():
            return jax.tree.map(lambda x: np.inf * x if x.dtype == np.float32 else x, loop.init())

        return dataclasses.replace(loop, init=init)

    told = refusal(ConfigError, assembly_of(experiment(), make_loop).initial_parameters)
    assert re.fullmatch(r"loop.init: [\w/.]+ holds numbers that are not finite", told)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"algorithm": "data_parallel", "driver": "virtual"},
            "config.algorithm: is data_parallel, but a loop in virtual time needs one of",
        ),
        (
            {"train": {"tokens": 100}, "driver": "virtual"},
            "config.train.tokens: is 100, but must be None for a loop in virtual time",
        ),
        (
            {"driver": "virtual", "virtual": {"seconds": 50.0}},
            "config.virtual.seconds: is 50.0, but must be None for a loop",
        ),
        ({"data": {"name": "mine"}}, "config.data: is there, but a loop of one's own has no such settings"),
        ({"model": {"name": "loop"}}, "config.model.factory: is '', but must be module:function"),
        (
            {"model": {**MODEL, "factory": "experiments.examples.plain_loop"}},
            "config.model.factory: is 'experiments.examples.plain_loop', but must be module:function or file",
        ),
    ],
)
def test_settings_that_a_loop_cannot_have_are_refused(changes, told):
    assert refusal(ConfigError, experiment, **changes).startswith(told)


@pytest.mark.parametrize(
    ("factory", "told"),
    [
        ("nowhere:make", "nowhere:make cannot be imported: ModuleNotFoundError"),
        (
            "experiments.examples.plain_loop:make",
            "experiments.examples.plain_loop:make cannot be imported: AttributeError",
        ),
        ("__main__:make", "__main__:make cannot be imported: ImportError: it is made in this process alone"),
        ("experiments.examples.plain_loop:__doc__", "experiments.examples.plain_loop:__doc__ is no function"),
    ],
)
def test_a_factory_that_cannot_be_had_is_told_in_a_line(factory, told):
    assert refusal(ConfigError, load_factory, factory).startswith(f"config.model.factory: {told}")


def test_a_factory_that_makes_something_else_is_told():
    with pytest.raises(ConfigError, match=r"gives dict, but must give a ddiloco\.Loop"):
        assembly_of(experiment(), lambda place, width: {}).check()


def test_positions_of_loops_are_for_as_many_learners_as_before():
    states = [{"learner": m, "num_learners": 3, "batches": 5 + m} for m in (2, 0)]
    assert reshard(states, 3) == [states[1], None, states[0]]
    with pytest.raises(DataError, match="cannot be shared among 2 learners"):
        reshard(states, 2)


def test_a_run_that_goes_on_does_not_look_for_the_weights_that_it_began_from(data_dir):
    assembly = assembly_of(workbench.experiment(data_dir, init_from="nowhere"))
    with pytest.raises(ConfigError, match="init_from: nowhere"):
        assembly.check()
    assembly.check(begins=False)
