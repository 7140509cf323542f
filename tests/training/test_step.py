"""The inner step: accumulation, donation, skipped steps, ahead-of-time compilation, and that it learns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddiloco.tasks.language_modelling import text_row
from ddiloco.training.inner_optimizer import InnerConfig
from ddiloco.training.loss import next_token_loss
from ddiloco.training.parameters import forward, sampled_parameters
from ddiloco.training.step import (
    TrainState,
    abstract_batch,
    abstract_state,
    make_train_step,
    shard_batch,
)
from tests.training.batches import TINY, init_state, mesh_of, packed_batch

ONE_LAYER = dataclasses.replace(TINY, num_layers=1)
INNER = InnerConfig(learning_rate=1e-2, warmup_steps=2)
RATE = np.float32(5e-3)


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(1)


@pytest.fixture(scope="module")
def step(mesh):
    return make_train_step(ONE_LAYER, INNER, mesh)


def host(tree):
    return jax.tree.map(np.array, tree)


def logits_of(params, batch):
    run = jax.jit(forward, static_argnums=0)
    logits = run(ONE_LAYER, params, batch["inputs"], batch["positions"], batch["segments"])
    return np.asarray(logits, np.float64)


def assert_same(left, right, **tolerance):
    for (path, a), b in zip(jax.tree.leaves_with_path(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, err_msg=jax.tree_util.keystr(path), **tolerance)


def test_loss_is_the_float64_cross_entropy_over_the_targets_that_count(mesh, step):
    batch = packed_batch(0, 4, 12, 32)
    state = init_state(ONE_LAYER, INNER, mesh, seed=0)
    wide = logits_of(state.params, batch)
    nll = np.log(np.exp(wide).sum(-1)) - np.take_along_axis(wide, batch["targets"][..., None], -1)[..., 0]
    expected = (nll * batch["weights"]).sum() / batch["weights"].sum()
    _, metrics = step(state, shard_batch(batch, mesh), RATE)
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)
    assert int(metrics["tokens"]) == batch["weights"].sum()
    assert metrics["learning_rate"] == RATE
    assert int(metrics["skipped"]) == 0


def test_gradient_is_the_central_difference(mesh, step):
    batch = packed_batch(1, 2, 10, 32)
    params = dict(sampled_parameters(ONE_LAYER, 1))
    loss = jax.jit(lambda params: next_token_loss(ONE_LAYER, params, batch).objective)
    gradients = jax.jit(jax.grad(loss))(params)
    tokens = batch["weights"].sum()
    norm = np.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in gradients.values()))
    _, metrics = step(init_state(ONE_LAYER, INNER, mesh, 1), shard_batch(batch, mesh), RATE)
    assert float(metrics["grad_norm"]) == pytest.approx(norm / tokens, rel=1e-4)
    nudge = 1e-2
    along = {name: leaf * (nudge / norm) for name, leaf in gradients.items()}
    ahead = loss({name: leaf + along[name] for name, leaf in params.items()})
    behind = loss({name: leaf - along[name] for name, leaf in params.items()})
    assert float(ahead - behind) / (2 * nudge) == pytest.approx(norm, rel=1e-2)


def test_the_old_state_is_donated_and_given_parameters_are_not(mesh, step):
    given = dict(sampled_parameters(ONE_LAYER, 0))
    numbers = host(given)
    old = init_state(ONE_LAYER, INNER, mesh, seed=0, params=given)
    new, _ = step(old, shard_batch(packed_batch(3, 2, 12, 32), mesh), RATE)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))
    assert_same(given, numbers, rtol=0)
    on_host = init_state(ONE_LAYER, INNER, mesh, seed=0, params=numbers)
    step(on_host, shard_batch(packed_batch(3, 2, 12, 32), mesh), RATE)
    assert_same(given, numbers, rtol=0)


def test_a_step_whose_gradient_is_not_finite_is_skipped_and_the_next_one_is_not(mesh, step):
    batch = shard_batch(packed_batch(4, 2, 12, 32), mesh)
    state, _ = step(init_state(ONE_LAYER, INNER, mesh, 0), batch, RATE)
    poisoned = dict(state.params, **{"final_norm/scale": state.params["final_norm/scale"] * jnp.nan})
    before = host(TrainState(poisoned, state.opt_state))
    after, metrics = step(TrainState(poisoned, state.opt_state), batch, RATE)
    assert int(metrics["skipped"]) == 1
    assert_same(host(after), before, rtol=0)
    healed = dict(after.params, **{"final_norm/scale": jnp.ones(16)})
    state = init_state(ONE_LAYER, INNER, mesh, 0, healed)
    moved, metrics = step(TrainState(state.params, after.opt_state), batch, RATE)
    assert int(metrics["skipped"]) == 0
    assert np.isfinite(moved.params["head/kernel"]).all()


def test_a_step_of_padding_alone_has_no_loss_and_is_finite(mesh, step):
    batch = {name: np.zeros_like(rows) for name, rows in packed_batch(5, 2, 12, 32).items()}
    state, metrics = step(init_state(ONE_LAYER, INNER, mesh, 0), shard_batch(batch, mesh), RATE)
    assert (float(metrics["loss"]), int(metrics["tokens"]), int(metrics["skipped"])) == (0.0, 0, 0)
    assert all(np.isfinite(leaf).all() for leaf in state.params.values())


def test_a_step_compiled_ahead_from_shapes_equals_the_jitted_one(mesh, step):
    batch = packed_batch(6, 2, 12, 32)
    shapes = abstract_state(ONE_LAYER, INNER, mesh), abstract_batch(mesh, 2, text_row(12))
    compiled = step.lower(*shapes, jax.ShapeDtypeStruct((), jnp.float32)).compile()
    early, early_metrics = compiled(init_state(ONE_LAYER, INNER, mesh, 0), shard_batch(batch, mesh), RATE)
    late, late_metrics = step(init_state(ONE_LAYER, INNER, mesh, 0), shard_batch(batch, mesh), RATE)
    assert_same(early, late, rtol=0)
    assert_same(early_metrics, late_metrics, rtol=0)


def test_z_loss_adds_the_squared_normaliser_to_the_objective_and_not_to_the_loss():
    batch, params = packed_batch(7, 2, 12, 32), dict(sampled_parameters(ONE_LAYER, 0))
    loss = jax.jit(next_token_loss, static_argnums=(0, 3))
    plain, with_z = loss(ONE_LAYER, params, batch, 0.0), loss(ONE_LAYER, params, batch, 0.1)
    normaliser = np.log(np.exp(logits_of(params, batch)).sum(-1))
    expected = 0.1 * (normaliser**2 * batch["weights"]).sum()
    assert float(with_z.objective - plain.objective) == pytest.approx(expected, rel=1e-4)
    assert float(with_z.nll) == pytest.approx(float(plain.nll), rel=1e-6)
    assert float(plain.objective) == float(plain.nll)
