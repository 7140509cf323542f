"""The mixture-of-experts decoder against a float64 reference, and what its routing promises."""

import collections
import dataclasses
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies

from ddiloco.config import ConfigError, build
from ddiloco.models import moe
from ddiloco.models.moe import MoEConfig, flops_per_token
from ddiloco.models.parameter import unconstrained
from ddiloco.training.loss import next_token_loss
from ddiloco.training.parameters import abstract_parameters, num_parameters, output, sampled_parameters
from tests.models import moe_reference
from tests.models.parameters import random_parameters
from tests.refusals import refusal
from tests.training.batches import packed_batch

CAPPED = MoEConfig(
    vocab_size=32,
    num_layers=2,
    model_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=24,
    num_experts=4,
    experts_per_token=2,
    expert_dim=8,
    capacity_factor=0.75,
    compute_dtype="float32",
)
DROPLESS = dataclasses.replace(CAPPED, capacity_factor=None)

run = jax.jit(output, static_argnums=0)


def output_of(config, params, batch):
    return run(config, params, batch["inputs"], batch["positions"], batch["segments"])


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"capacity_factor": None}, marks=pytest.mark.slow),
        {"shared_expert_dim": 12, "dense_layers": 1, "activation": "geglu"},
        {"capacity_factor": None, "experts_per_token": 1, "normalize_gates": False, "tie_embeddings": True},
        {"num_layers": 3, "dense_layers": 1, "scan_layers": True, "remat": "full", "experts_per_token": 3},
    ],
    ids=["capped", "dropless", "capped_shared_dense", "dropless_switch", "scanned_three"],
)
def test_forward_is_the_float64_reference(changes):
    config = dataclasses.replace(CAPPED, **changes)
    params, batch = random_parameters(config), packed_batch(1, 3, 12, config.vocab_size)
    found = output_of(config, params, batch)
    expected, counts = moe_reference.decode(
        params, config, batch["inputs"], batch["positions"], batch["segments"]
    )
    np.testing.assert_allclose(found.logits, expected, rtol=2e-5, atol=2e-5)
    for name in counts:
        np.testing.assert_allclose(found.sums[name], counts[name], rtol=1e-5, atol=1e-5, err_msg=name)
    if config.capacity_factor is None:
        assert counts["dropped"].sum() == 0
    else:
        assert counts["dropped"].sum() > 0
    penalty = 0.01 * counts["balance"].sum() + 0.001 * counts["router_z"].sum()
    assert float(found.penalty) == pytest.approx(penalty, rel=1e-5)


def every_expert_on_every_token(params, x_BxLxD, weights_BxLxE):
    """The experts' sum with these weights, as one dense formula."""
    inner = jax.nn.silu(jnp.einsum("bld,edf->blef", x_BxLxD, params["gate"]))
    inner = inner * jnp.einsum("bld,edf->blef", x_BxLxD, params["up"])
    return jnp.einsum("blef,efd,ble->bld", inner, params["down"], weights_BxLxE)


@pytest.mark.parametrize("config", [CAPPED, pytest.param(DROPLESS, marks=pytest.mark.slow)])
def test_gradients_of_experts_are_those_of_every_expert_on_every_token(config):
    rng = np.random.default_rng(0)
    experts = moe.Experts(config, nnx.Rngs(0))
    params = {name: getattr(experts, name)[...] for name in ("gate", "up", "down")}
    x, probe = (jnp.asarray(rng.normal(size=(3, 12, 16)), jnp.float32) for _ in range(2))
    chosen = np.argsort(rng.normal(size=(3, 12, 4)))[..., :2].astype(np.int32)
    gates = jnp.asarray(rng.uniform(size=(3, 12, 2)), jnp.float32)
    counted = jnp.ones((3, 12), bool)
    place = np.asarray(moe.place_of_choices(chosen.reshape(3, -1), jnp.repeat(counted, 2, 1), 4))
    kept = (place < config.places(12)).reshape(3, 12, 2)
    graph, _ = nnx.split(experts)

    def ours(params, x, gates):
        module = nnx.merge(graph, nnx.State({name: nnx.Param(value) for name, value in params.items()}))
        routing = moe.Routing(chosen, gates, jnp.zeros((3, 12, 4)))
        return jnp.sum(module(x, routing, counted, unconstrained)[0] * probe)

    def dense(params, x, gates):
        weights = jnp.sum(jax.nn.one_hot(chosen, 4) * (gates * kept)[..., None], axis=2)
        return jnp.sum(every_expert_on_every_token(params, x, weights) * probe)

    found, expected = (jax.jit(jax.grad(f, argnums=(0, 1, 2)))(params, x, gates) for f in (ours, dense))
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [DROPLESS, pytest.param(CAPPED, marks=pytest.mark.slow)])
def test_the_routers_gradient_is_the_central_difference(config):
    config = dataclasses.replace(config, num_layers=1, balance_weight=0.5, router_z_weight=0.1)
    params, batch = random_parameters(config, 3), packed_batch(2, 3, 12, 32)
    name = "layers/0/mlp/router/kernel"

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradient(kernel):
        return next_token_loss(config, {**params, name: kernel}, batch).objective

    _, gradient = loss_and_gradient(params[name])
    norm, nudge = float(jnp.linalg.norm(gradient)), 2e-3
    ahead, behind = (
        float(loss_and_gradient(params[name] + sign * nudge / norm * gradient)[0]) for sign in (1, -1)
    )
    assert (ahead - behind) / (2 * nudge) == pytest.approx(norm, rel=2e-2)


choice = strategies.tuples(strategies.integers(0, 4), strategies.booleans())  # the expert; whether it counts
rows_of_choices = strategies.integers(1, 3).flatmap(
    lambda rows: strategies.lists(
        strategies.lists(choice, min_size=7, max_size=7), min_size=rows, max_size=rows
    )
)


@hypothesis.given(rows_of_choices)
@hypothesis.settings(max_examples=60, derandomize=True)
def test_a_choice_has_as_many_before_it_as_its_row_has_earlier_for_the_expert(rows):
    experts = np.array([[expert for expert, _ in row] for row in rows], np.int32)
    counted = np.array([[count for _, count in row] for row in rows])
    found = np.asarray(moe.place_of_choices(experts, counted, 5))
    for row, places in zip(rows, found, strict=True):
        before = collections.Counter()
        for (expert, count), place in zip(row, places, strict=True):
            assert not count or place == before[expert]
            before[expert] += count


def test_places_are_the_fair_share_times_the_factor_rounded_up_and_no_more_than_tokens():
    assert CAPPED.places(12) == math.ceil(0.75 * 2 * 12 / 4) == 5
    assert dataclasses.replace(CAPPED, capacity_factor=0.01).places(12) == 1
    assert dataclasses.replace(CAPPED, capacity_factor=9.0).places(12) == DROPLESS.places(12) == 12


def test_the_router_computes_in_float32_whatever_the_model_does():
    narrow = dataclasses.replace(CAPPED, compute_dtype="bfloat16")
    router = moe.Router(narrow, nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 16)), jnp.bfloat16)
    expected = np.asarray(x, np.float64) @ np.asarray(router.kernel[...], np.float64)
    routing = router(x, jnp.ones((1, 3), bool))
    assert routing.logits_BxLxE.dtype == routing.gates_BxLxA.dtype == jnp.float32
    np.testing.assert_allclose(routing.logits_BxLxE, expected, rtol=1e-6, atol=1e-7)


def test_statistics_are_means_over_layers_and_tokens():
    sums = {
        "load": np.array([[6.0, 2.0], [4.0, 4.0]]),
        "entropy": np.array([2.0, 3.0]),
        "router_z": np.array([1.0, 1.0]),
        "balance": np.array([5.0, 4.0]),
        "routed": np.array([4.0, 4.0]),
        "dropped": np.array([2.0, 0.0]),
        "penalty": np.array(0.6),
    }
    assert moe.statistics(sums, np.float64(3)) == {
        "penalty": pytest.approx(0.2),
        "balance": 9 / 8,
        "router_z": 2 / 8,
        "router_entropy": 5 / 8,
        "dropped_share": 2 / 16,
        "max_load": 1.5,
        "min_load": 0.5,
        "max_load/0": 1.5,
        "max_load/1": 1.0,
    }
    nothing = moe.statistics({name: 0 * value for name, value in sums.items()}, np.int32(0))
    assert set(nothing.values()) == {0.0}


def test_fresh_parameters_predict_and_choose_about_evenly():
    config = dataclasses.replace(CAPPED, num_layers=1, model_dim=64, vocab_size=256)
    batch = packed_batch(8, 8, 32, 256)
    sums = jax.jit(next_token_loss, static_argnums=0)(config, dict(sampled_parameters(config, 0)), batch)
    assert np.log(256) - 0.1 < float(sums.nll / sums.tokens) < np.log(256) + 1.0
    told = moe.statistics(sums.model, sums.tokens)
    assert float(told["router_entropy"]) > 0.98 * math.log(4)


def test_the_penalty_is_in_the_objective_and_not_in_the_loss():
    config = dataclasses.replace(CAPPED, num_layers=1)
    params, batch = random_parameters(config), packed_batch(1, 3, 12, 32)
    unweighted = dataclasses.replace(config, balance_weight=0.0, router_z_weight=0.0)
    loss = jax.jit(next_token_loss, static_argnums=0)
    sums, plain = loss(config, params, batch), loss(unweighted, params, batch)
    assert float(sums.nll) == float(plain.nll) == float(plain.objective)
    penalty = 0.01 * sums.model["balance"].sum() + 0.001 * sums.model["router_z"].sum()
    assert float(sums.objective - sums.nll) == pytest.approx(float(penalty), rel=1e-3)


def test_operations_and_activated_parameters_are_those_that_a_token_passes():
    config = dataclasses.replace(CAPPED, shared_expert_dim=12, dense_layers=1)
    one_expert = 3 * 16 * 8
    assert moe.idle_parameters(config) == 2 * one_expert
    names = abstract_parameters(config)
    idle_tables = sum(math.prod(names[n].shape) for n in names if "norm" in n or n.startswith("embed"))
    in_matmuls = num_parameters(config) - idle_tables - moe.idle_parameters(config)
    attention = 12 * config.num_layers * config.num_heads * config.head_dim * 100
    assert flops_per_token(config, 100) == 6 * in_matmuls + attention


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"num_experts": 4, "experts_per_token": 5},
            "model.experts_per_token: is 5, but must be at most num_experts 4",
        ),
        (
            {"experts_per_token": 1},
            "model.normalize_gates: is True, but with experts_per_token 1 every gate would be 1 "
            "and the router learn nothing from the loss",
        ),
        ({"dense_layers": 4, "num_layers": 4}, "model.dense_layers: is 4, but must be below num_layers 4"),
    ],
)
def test_settings_that_do_not_fit_are_told_in_a_line(values, told):
    assert refusal(ConfigError, build, MoEConfig, values, "model") == told
