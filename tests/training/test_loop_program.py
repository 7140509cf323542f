"""What of a loop's state is a parameter, what of it outlives a process, and what a loop must not be."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ddiloco.config import ConfigError
from ddiloco.data.errors import DataError
from ddiloco.training.loop import Loop, Place
from ddiloco.training.loop_program import HostLoopBatches, LoopBatches, LoopProgram
from ddiloco.training.mesh import MeshConfig, carve


def place(devices=1):
    return Place(1, 2, 0, carve(jax.devices()[:devices], 1, MeshConfig())[0])


def init():
    weights = jnp.arange(3.0)
    return {
        "params": {"w": weights},
        "average": weights,  # the same array, and no parameter
        "key": jax.random.key(7),
        "count": 0,
        "activation": jnp.tanh,  # no array at all
    }


def step(state, batch):
    key, noise = jax.random.split(state["key"])
    w = state["params"]["w"] + batch["x"].sum() + jax.random.normal(noise, (3,))
    average = 0.5 * (w + state["average"])
    count = state["count"] + 1
    stepped = {**state, "params": {"w": w}, "average": average, "key": key, "count": count}
    return stepped, {"loss": jnp.abs(state["activation"](w)).sum()}


def batches():
    yield from ({"x": np.full(4, float(n), np.float32)} for n in range(100))


LOOP = Loop(init, step, batches, params=lambda state: state["params"])


def test_parameters_have_names_and_all_other_arrays_are_the_inner_state():
    program = LoopProgram(LOOP, place())
    assert program.shapes == {"w": (3,)}
    told = sorted((leaf.shape, str(leaf.dtype)) for leaf in program.inner_leaves)
    assert told == [((), "int32"), ((2,), "uint32"), ((3,), "float32")]  # count, the key's numbers, average
    np.testing.assert_array_equal(program.initial_parameters()["w"], [0, 1, 2])
    np.testing.assert_array_equal(program.tree({"w": np.ones(3)})["w"], np.ones(3))


def test_a_state_taken_over_goes_on_as_the_one_that_it_was_taken_from():
    program, given = LoopProgram(LOOP, place()), batches()
    state = program.state_from(program.initial_parameters())
    for clock in range(3):
        state, _ = program.step(state, next(given), clock)
    inner = [np.asarray(leaf) for leaf in program.inner_state(state)]
    params = {name: np.asarray(x) for name, x in state.params.items()}
    other = LoopProgram(LOOP, place())
    taken_over, batch = other.state_from(params, inner), next(given)
    ours, theirs = program.step(program.copy(state), batch, 3), other.step(taken_over, batch, 3)
    assert jax.tree.all(jax.tree.map(np.array_equal, ours, theirs))
    fresh, _ = program.step(program.state_from(params), batch, 3)
    assert not np.array_equal(fresh.params["w"], ours[0].params["w"])  # another key


def test_a_step_may_donate_its_state_and_neither_copy_nor_init_is_lost():
    program = LoopProgram(dataclasses.replace(LOOP, step=donating), place())
    params = program.initial_parameters()
    state = program.state_from(params)
    copy = program.copy(state)
    program.step(state, next(batches()), 0)
    assert state.params["w"].is_deleted()
    np.testing.assert_array_equal(copy.params["w"], params["w"])
    np.testing.assert_array_equal(params["w"], [0, 1, 2])


def test_a_parameter_that_is_also_elsewhere_in_the_state_may_be_overwritten():
    def target_follows(state, batch):
        stepped, metrics = step(state, batch)
        return {**stepped, "average": stepped["params"]["w"]}, metrics

    program = LoopProgram(dataclasses.replace(LOOP, step=target_follows), place())
    state, _ = program.step(program.state_from(program.initial_parameters()), next(batches()), 0)
    value = np.asarray(state.params["w"])
    jax.jit(lambda w: w + 1, donate_argnums=0)(state.params["w"])  # as an update does
    again, _ = program.step(dataclasses.replace(state, params={"w": jnp.zeros(3)}), next(batches()), 1)
    kept = [np.asarray(leaf) for leaf in state.opt_state if np.shape(leaf) == (3,)]
    np.testing.assert_array_equal(kept, [value])
    assert np.isfinite(again.params["w"]).all()


def donating(state, batch):
    arrays = {name: leaf for name, leaf in state.items() if name != "activation"}
    stepped, metrics = _donating(arrays, batch)
    return {**stepped, "activation": jnp.tanh}, metrics


@functools.partial(jax.jit, donate_argnums=0)
def _donating(arrays, batch):
    stepped, metrics = step({**arrays, "activation": jnp.tanh}, batch)
    return {name: leaf for name, leaf in stepped.items() if name != "activation"}, metrics


def test_parameters_stay_sharded_as_init_lays_them():
    def sharded():
        sharding = NamedSharding(here.mesh, PartitionSpec("data"))
        return {"params": {"w": jax.device_put(jnp.arange(8.0), sharding)}, "count": jnp.zeros((), jnp.int32)}

    def stepped(state, batch):
        del batch
        return jax.tree.map(lambda x: x + 1, state), {"loss": state["params"]["w"].sum()}

    here = place(devices=4)
    program = LoopProgram(Loop(sharded, jax.jit(stepped), batches, lambda state: state["params"]), here)
    program.compile()
    state, metrics = program.step(program.state_from({"w": np.ones(8, np.float32)}), None, 0)
    assert state.params["w"].sharding.shard_shape((8,)) == (2,)
    assert len(state.opt_state[0].devices()) == 4
    np.testing.assert_array_equal(state.params["w"], np.full(8, 2.0))
    assert metrics["loss"] == 8


WRONG = {
    "step": [
        (lambda state, batch: state, "loop.step: gives dict, but must give a pair (state, metrics)"),
        (lambda state, batch: (state, jnp.zeros(())), "loop.step: its metrics must be a dict of scalars"),
        (lambda state, batch: (state, {"loss": jnp.zeros(3)}), "loop.step: its metrics must be a dict of"),
        (lambda state, batch: (state["params"], {}), "loop.step: gives a state of another structure"),
        (
            lambda state, batch: ({**state, "params": {"w": jnp.zeros(4)}}, {}),
            "loop.step: made float32[4] of an array that init made float32[3]",
        ),
        (lambda state, batch: (state, {"l": jnp.zeros(())}), "loop.step: its metrics are l, but need a loss"),
    ],
    "params": [
        (lambda state: {"w": 2 * state["params"]["w"]}, "loop.params: w is no leaf of the state"),
        (lambda state: {"n": state["count"]}, "loop.params: n is int32[], but parameters must be float32"),
        (lambda state: {}, "loop.params: gives no parameter"),
    ],
    "batches": [(lambda: iter(()), "loop.batches: gave no batch")],
    "tokens": [(lambda batch: "many", "loop.tokens: must give a whole number")],
}


@pytest.mark.parametrize(
    ("part", "wrong", "told"), [(part, *case) for part, cases in WRONG.items() for case in cases]
)
def test_what_is_wrong_with_a_loop_is_told_in_a_line(part, wrong, told):
    with pytest.raises(ConfigError) as raised:
        LoopProgram(dataclasses.replace(LOOP, **{part: wrong}), place()).compile()
    assert str(raised.value).startswith(told)
    assert "\n" not in str(raised.value)


def test_tokens_are_rows_unless_the_loop_counts_them():
    batch = next(batches())
    assert LoopProgram(LOOP, place()).tokens(batch) == 4
    adding = dataclasses.replace(LOOP, tokens=lambda batch: (2 * np.ones_like(batch["x"], np.int64)).sum())
    assert json.dumps(LoopProgram(adding, place()).tokens(batch)) == "8"


class Counter:
    """An iterator with a state of its own."""

    def __init__(self):
        self.at = 0

    def __next__(self):
        self.at += 1
        return self.at

    def __iter__(self):
        return self

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


class Packed(Counter):
    """One whose state is bytes, as that of Grain's DataLoader."""

    def get_state(self):
        return str(self.at).encode()

    def set_state(self, state):
        self.at = int(state)


@pytest.mark.parametrize("make", [batches, Counter, Packed])
def test_batches_go_on_where_another_process_left_off(make):
    loop = dataclasses.replace(LOOP, batches=make)
    first, later = LoopBatches(loop, place()), LoopBatches(loop, place())
    for _ in range(5):
        next(first)
    later.set_state(json.loads(json.dumps(first.get_state())))
    assert later.get_state() == first.get_state()
    assert jax.tree.all(jax.tree.map(np.array_equal, next(first), next(later)))


def test_batches_without_a_state_of_their_own_are_drawn_once_however_often_the_place_is_set():
    drawn = []

    def counted():
        for batch in batches():
            drawn.append(batch)
            yield batch

    mine = LoopBatches(dataclasses.replace(LOOP, batches=counted), place())
    for _ in range(2):
        mine.set_state({"learner": 1, "num_learners": 2, "batches": 40})
    assert len(drawn) == 40


def test_batches_of_another_learner_or_an_end_are_refused():
    loop = dataclasses.replace(LOOP, batches=lambda: iter([1]))
    mine = LoopBatches(loop, place())
    with pytest.raises(DataError, match="must be of batches of"):
        mine.set_state({"learner": 0, "num_learners": 2, "batches": 0})
    next(mine)
    with pytest.raises(DataError, match="ended after 1, but must be endless"):
        next(mine)


def of_hosts(program):
    own = [LoopBatches(LOOP, place()) for _ in range(2)]
    return [HostLoopBatches(batches, program.tokens, host) for host, batches in enumerate(own)]


def test_of_a_learner_of_several_hosts_each_goes_on_and_the_first_counts_the_tokens():
    program = LoopProgram(LOOP, place())
    hosts, later = of_hosts(program), of_hosts(program)
    for _ in range(3):
        assert [next(host).tokens for host in hosts] == [{0: 4}, {}]
    state = json.loads(json.dumps(HostLoopBatches.joined([host.get_state() for host in hosts])))
    for host, other in zip(later, hosts, strict=True):
        host.set_state(state)
        np.testing.assert_array_equal(next(host).rows["x"], next(other).rows["x"])
    with pytest.raises(DataError, match="is not of a learner with a host 2"):
        HostLoopBatches(LoopBatches(LOOP, place()), program.tokens, 2).set_state(state)
