"""Experts over a mesh: steps and evaluations give the same numbers on one device and on eight."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from ddiloco.models.moe import MoEConfig
from ddiloco.outer.stacks import unstacked
from ddiloco.training.evaluation import evaluate, make_eval_step
from ddiloco.training.inner_optimizer import InnerConfig
from tests.training.batches import mesh_of, packed_batch, trained

CONFIG = MoEConfig(
    vocab_size=32,
    num_layers=1,
    model_dim=16,
    num_heads=4,
    num_kv_heads=4,
    head_dim=4,
    num_experts=8,
    experts_per_token=2,
    expert_dim=8,
    capacity_factor=0.75,
    compute_dtype="float32",
    balance_weight=0.1,
    router_z_weight=0.01,
)
DROPLESS = dataclasses.replace(CONFIG, capacity_factor=None)
SCANNED = dataclasses.replace(
    DROPLESS, num_layers=3, dense_layers=1, scan_layers=True, remat="full", logits_chunk=10
)
STAGED = dataclasses.replace(DROPLESS, num_layers=4, dense_layers=2, scan_layers=True)
STAGED_CAPPED = dataclasses.replace(CONFIG, num_layers=4, scan_layers=True, stage_repeats=2, remat="full")
INNER = InnerConfig(learning_rate=1e-3, warmup_steps=0)
BATCHES = [packed_batch(seed, 16, 12, 32) for seed in range(2)]


def run(config, mesh, inner=INNER):
    """Parameters and metrics after each step, and the score after the last."""
    state, history = trained(config, inner, mesh, BATCHES)
    score = evaluate(config, make_eval_step(config, mesh), state.params, BATCHES, mesh)
    return unstacked(jax.device_get(state.params)), history, score


@functools.cache
def alone(config):
    """The same on one device, each layer by itself but where four of them would take long to compile."""
    plain = {"scan_layers": config.num_layers == 4, "remat": "none", "logits_chunk": None, "stage_repeats": 1}
    return run(dataclasses.replace(config, **plain), mesh_of(1))


@pytest.mark.parametrize(
    ("config", "sizes", "accumulation"),
    [
        pytest.param(CONFIG, {"data": 1, "expert": 8}, 1, marks=pytest.mark.slow),
        (CONFIG, {"data": 1, "fsdp": 2, "tensor": 2, "expert": 2}, 2),
        pytest.param(DROPLESS, {"data": 2, "expert": 4}, 1, marks=pytest.mark.slow),
        pytest.param(DROPLESS, {"data": 2, "fsdp": 2, "tensor": 2}, 1, marks=pytest.mark.slow),
        pytest.param(SCANNED, {"data": 1, "fsdp": 2, "tensor": 2, "expert": 2}, 1, marks=pytest.mark.slow),
        pytest.param(STAGED, {"data": 1, "stage": 2, "tensor": 2, "expert": 2}, 1, marks=pytest.mark.slow),
        pytest.param(
            STAGED_CAPPED, {"data": 1, "stage": 2, "fsdp": 2, "expert": 2}, 1, marks=pytest.mark.slow
        ),
    ],
    ids=[
        "capped_expert8",
        "capped_mixed",
        "dropless_expert4",
        "dropless_tensor2",
        "scanned_mixed",
        "dropless_staged",
        "capped_staged",
    ],
)
def test_eight_devices_agree_with_one_drops_and_balance_included(config, sizes, accumulation):
    expected_params, expected_history, expected_score = alone(config)
    inner = dataclasses.replace(INNER, accumulation=accumulation)
    params, history, score = run(config, mesh_of(8, **sizes), inner)
    for metrics, expected in zip(history, expected_history, strict=True):
        assert metrics.keys() == expected.keys()
        for name in metrics:
            np.testing.assert_allclose(metrics[name], expected[name], rtol=2e-5, atol=1e-6, err_msg=name)
    assert (history[0]["dropped_share"] > 0) is np.bool_(config.capacity_factor is not None)
    for name in params:
        np.testing.assert_allclose(params[name], expected_params[name], rtol=2e-5, atol=2e-5, err_msg=name)
    assert score.loss == pytest.approx(expected_score.loss, rel=1e-6)
    assert score.statistics == pytest.approx(expected_score.statistics, rel=1e-5, abs=1e-6)
