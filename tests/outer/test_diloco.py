"""DiLoCo in one process: equal to a run of one learner, and at home where optax's optimizers are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import ddiloco
from ddiloco.config import ConfigError

TRUE = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)


def init():
    key = jax.random.key(3)
    return {
        "embed": {"w": jax.random.normal(key, (6, 33))},
        "out": {"w": jnp.zeros((33, 5)), "b": jnp.zeros(5)},
    }


def loss_of(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["embed"]["w"]) @ params["out"]["w"] + params["out"]["b"] - y) ** 2)


def batches(shift=0.0):
    random = np.random.default_rng(7)
    while True:
        x = random.standard_normal((16, 6)).astype(np.float32)
        yield x, x @ TRUE + np.float32(shift)


def trained(optimizer, count, donate=False, of=batches):
    @functools.partial(jax.jit, donate_argnums=(0, 1) if donate else ())
    def step(params, state, batch):
        gradient = jax.grad(loss_of)(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params = init()
    state = optimizer.init(params)
    for _, batch in zip(range(count), of(), strict=False):
        params, state = step(params, state, batch)
    return params, state


def make_loop(place):
    inner = optax.adam(0.02)

    @jax.jit
    def step(state, batch):
        loss, gradient = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, moments = inner.update(gradient, state["inner"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "inner": moments}, {"loss": loss}

    begun = lambda: {"params": init(), "inner": inner.init(init())}  # noqa: E731
    return ddiloco.Loop(begun, step, batches, params=lambda state: state["params"])


@pytest.mark.parametrize(
    ("num_fragments", "outer"),
    [
        (1, {}),
        pytest.param(3, {"merge": "direct", "momentum": 0.9}, marks=pytest.mark.slow),
        pytest.param(
            3, {"merge": "clipped", "optimizer": "adam", "learning_rate": 0.1}, marks=pytest.mark.slow
        ),
    ],
)
def test_it_gives_the_bits_of_a_run_of_one_learner_that_waits(num_fragments, outer, one_device, tmp_path):
    steps, interval = 16, 5
    real = ddiloco.train(
        make_loop,
        tmp_path,
        learners=1,
        steps=steps,
        algorithm="diloco" if num_fragments == 1 else "streaming",
        sync={"num_fragments": num_fragments, "interval": interval, "quorum": None, "max_run_ahead": 0},
        outer=outer,
        eval={"every": 0},
    )
    optimizer = ddiloco.diloco(optax.adam(0.02), interval, num_fragments=num_fragments, steps=steps, **outer)
    params, state = trained(optimizer, steps)
    jax.tree.map(np.testing.assert_array_equal, params, real.params)
    jax.tree.map(np.testing.assert_array_equal, state.global_params, real.params)
    assert sum(real.summary["outer_steps"].values()) > num_fragments


def test_between_outer_steps_the_inner_optimizer_steps_as_by_itself():
    params, state = trained(ddiloco.diloco(optax.adam(0.02), interval=5, num_fragments=1), 4)
    alone, _ = trained(optax.adam(0.02), 4)
    jax.tree.map(np.testing.assert_array_equal, params, alone)
    jax.tree.map(np.testing.assert_array_equal, state.global_params, init())


def test_a_step_may_donate_parameters_and_state():
    optimizer = ddiloco.diloco(optax.adam(0.02), interval=3, num_fragments=2)
    jax.tree.map(np.testing.assert_array_equal, trained(optimizer, 7)[0], trained(optimizer, 7, True)[0])


def test_an_outer_step_that_is_not_finite_is_not_taken():
    def broken():
        return batches(np.nan)

    params, state = trained(ddiloco.diloco(optax.sgd(0.1), interval=2), 2, of=broken)
    assert np.isnan(params["out"]["b"]).all()
    jax.tree.map(np.testing.assert_array_equal, state.global_params, init())
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.outer))


def test_it_is_an_optimizer_for_nnx_for_accumulation_and_for_arrays_of_numpy():
    model = nnx.Linear(6, 5, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ddiloco.diloco(optax.sgd(0.1), interval=2), wrt=nnx.Param)
    before = np.array(model.kernel[...])
    for _, (x, y) in zip(range(2), batches(), strict=False):
        optimizer.update(model, nnx.grad(lambda m, x=x, y=y: jnp.mean((m(x) - y) ** 2))(model))
    theta = optimizer.opt_state.global_params["kernel"]
    np.testing.assert_array_equal(model.kernel[...], theta[...])
    assert (model.kernel[...] != before).all()

    # Of two mini-steps the first changes nothing.
    every = optax.MultiSteps(ddiloco.diloco(optax.sgd(0.5), interval=1, learning_rate=1.0, momentum=0.0), 2)
    params = {"w": np.ones(2, np.float32)}
    state, seen = every.init(params), []
    for _ in range(2):
        updates, state = every.update({"w": jnp.ones(2)}, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(float(params["w"][0]))
    assert seen == [1.0, 0.5]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"interval": 0}, r"diloco\.interval: is 0, but must be at least 1"),
        ({"interval": 2, "codec": "int4"}, r"diloco\.codec: is there, but in one process nothing is sent"),
        ({"interval": 2, "momentun": 0.9}, r"diloco\.momentun: no such setting; did you mean momentum\?"),
        ({"interval": 2, "optimizer": "nadam2"}, r"diloco\.optimizer: is 'nadam2', but must be one of"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, error):
    with pytest.raises(ConfigError, match=error):
        ddiloco.diloco(optax.sgd(0.1), **settings)


def test_parameters_must_be_there_and_float32():
    optimizer = ddiloco.diloco(optax.sgd(0.1), interval=2)
    with pytest.raises(ValueError, match="a/b is bfloat16, but parameters must be float32"):
        optimizer.init({"a": {"b": jnp.ones(2, jnp.bfloat16)}})
    params = {"w": jnp.ones(2)}
    with pytest.raises(ValueError, match="update needs params"):
        optimizer.update(params, optimizer.init(params))
