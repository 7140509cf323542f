"""The dense decoder against a float64 reference, and what its settings promise."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddiloco.config import ConfigError, build
from ddiloco.models import MODELS, model_of
from ddiloco.models.dense import DenseConfig, flops_per_token
from ddiloco.models.stack import REMAT
from ddiloco.training.loss import next_token_loss
from ddiloco.training.parameters import forward, num_parameters, sampled_parameters
from tests.models.decoder_reference import decode
from tests.models.parameters import random_parameters
from tests.refusals import refusal
from tests.training.batches import TINY, packed_batch


def logits_of(config, params, batch):
    run = jax.jit(forward, static_argnums=0)
    return np.asarray(run(config, params, batch["inputs"], batch["positions"], batch["segments"]))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"activation": "geglu", "tie_embeddings": True},
        {"num_kv_heads": 4, "rope_theta": 100.0},
        {"num_layers": 3, "scan_layers": True, "remat": "dots_saveable"},
    ],
    ids=["swiglu_grouped", "geglu_tied", "full_heads", "scanned"],
)
def test_forward_is_the_float64_reference(changes):
    config = dataclasses.replace(TINY, **changes)
    params, batch = random_parameters(config), packed_batch(1, 3, 16, config.vocab_size)
    expected = decode(params, config, batch["inputs"], batch["positions"], batch["segments"])
    np.testing.assert_allclose(logits_of(config, params, batch), expected, rtol=1e-5, atol=1e-5)


BATCH = packed_batch(6, 3, 16, TINY.vocab_size)


@functools.partial(jax.jit, static_argnums=1)
@functools.partial(jax.value_and_grad)
def loss_and_gradient(params, config):
    return next_token_loss(config, params, BATCH, z_loss=0.01).objective


OFTEN = (("dots_saveable", True),)


@pytest.mark.parametrize(
    ("policy", "scan"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in OFTEN))
        for case in itertools.product([policy for policy in REMAT if policy != "none"], (False, True))
    ],
)
def test_remat_and_scan_change_neither_loss_nor_gradient_and_remat_does_recompute(policy, scan):
    params, rematted = random_parameters(TINY), dataclasses.replace(TINY, remat=policy, scan_layers=scan)
    (loss, gradient), (expected_loss, expected) = (loss_and_gradient(params, c) for c in (rematted, TINY))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    for name in expected:
        np.testing.assert_allclose(gradient[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
    layers = 1 if scan else TINY.num_layers
    assert str(loss_and_gradient.trace(params, rematted).jaxpr).count("remat") >= layers
    assert "remat" not in str(loss_and_gradient.trace(params, TINY).jaxpr)


@pytest.mark.parametrize("chunk", [19, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 100))])
def test_logits_in_chunks_give_the_same_loss_and_gradient(chunk):
    whole = dataclasses.replace(TINY, tie_embeddings=True)
    params, config = random_parameters(whole), dataclasses.replace(whole, logits_chunk=chunk)
    (loss, gradient), (expected_loss, expected) = (loss_and_gradient(params, c) for c in (config, whole))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    for name in expected:
        np.testing.assert_allclose(gradient[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(logits_of(config, params, BATCH), logits_of(whole, params, BATCH))


def test_logits_in_chunks_never_exist_all_at_a_time():
    whole = dataclasses.replace(TINY, mlp_dim=24)
    params, in_chunks = random_parameters(whole), dataclasses.replace(whole, logits_chunk=8)
    assert "f32[3,16,32]" in str(loss_and_gradient.trace(params, whole).jaxpr)
    assert "f32[3,16,32]" not in str(loss_and_gradient.trace(params, in_chunks).jaxpr)


def test_bfloat16_computes_near_float32_and_keeps_float32_parameters_and_logits():
    narrow = dataclasses.replace(TINY, compute_dtype="bfloat16")
    params, batch = dict(sampled_parameters(TINY, 0)), packed_batch(7, 3, 16, TINY.vocab_size)
    assert {leaf.dtype for leaf in dict(sampled_parameters(narrow, 0)).values()} == {jnp.dtype("float32")}
    logits = logits_of(narrow, params, batch)
    assert logits.dtype == np.float32
    difference = np.abs(logits - logits_of(TINY, params, batch)).max()
    assert 1e-6 < difference < 0.1


def test_flops_are_six_a_weight_in_a_matmul_and_twelve_for_attention():
    in_matmuls = num_parameters(TINY) - 32 * 16 - (2 * 16 + 2 * 4) * 2 - 16
    attention = 12 * TINY.num_layers * TINY.num_heads * TINY.head_dim * 100
    assert flops_per_token(TINY, 100) == 6 * in_matmuls + attention
    tied = dataclasses.replace(TINY, tie_embeddings=True)
    assert flops_per_token(tied, 100) == flops_per_token(TINY, 100)


def test_the_registry_finds_the_model_of_settings():
    for name in ("dense", "moe"):
        assert model_of(build(MODELS[name].config, {"num_layers": 1})) is MODELS[name]
    with pytest.raises(TypeError, match="str is not the settings of a model; there are captioner, dense, "):
        model_of("dense")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"num_heads": 6, "num_kv_heads": 4},
            "model.num_heads: is 6, but must be a multiple of num_kv_heads 4",
        ),
        ({"head_dim": 7}, "model.head_dim: is 7, but must be even"),
        (
            {"attention": "cudnn", "compute_dtype": "float32"},
            "model.attention: is cudnn, but that needs compute_dtype bfloat16",
        ),
        (
            {"attention": "cudnn", "compute_dtype": "bfloat16", "head_dim": 12},
            "model.head_dim: is 12, but must be a multiple of 8 for cudnn",
        ),
    ],
)
def test_settings_that_do_not_fit_are_told_in_a_line(values, told):
    assert refusal(ConfigError, build, DenseConfig, values, "model") == told
