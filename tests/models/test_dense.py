"""The dense decoder against a float64 reference, and what its masks and settings promise."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddiloco.config import ConfigError, build
from ddiloco.models import MODELS, model_of
from ddiloco.models.dense import DenseConfig, flops_per_token
from ddiloco.training.loss import next_token_loss
from ddiloco.training.parameters import abstract_parameters, forward, init_parameters, num_parameters
from tests.models.decoder_reference import decode
from tests.training.batches import TINY, packed_batch


def random_parameters(config, seed=0):
    """Parameters none of which is at a special value, norms included."""
    rng = np.random.default_rng(seed)
    shapes = abstract_parameters(config)
    return {
        name: jnp.asarray(
            rng.normal(1.0 if name.endswith("scale") else 0.0, 0.3, leaf.shape).astype(np.float32)
        )
        for name, leaf in shapes.items()
    }


def logits_of(config, params, batch):
    run = jax.jit(forward, static_argnums=0)
    return np.asarray(run(config, params, batch["inputs"], batch["positions"], batch["segments"]))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": "geglu", "qk_norm": False, "tie_embeddings": True},
        {"num_kv_heads": 4, "logit_softcap": 2.0, "rope_theta": 100.0},
    ],
    ids=["swiglu_grouped_normed", "geglu_tied", "softcap_full_heads"],
)
def test_forward_is_the_float64_reference(changes):
    config = dataclasses.replace(TINY, **changes)
    params, batch = random_parameters(config), packed_batch(1, 3, 12, config.vocab_size)
    expected = decode(params, config, batch["inputs"], batch["positions"], batch["segments"])
    np.testing.assert_allclose(logits_of(config, params, batch), expected, rtol=1e-5, atol=1e-5)


def test_tokens_of_another_document_change_nothing():
    params, batch = random_parameters(TINY), packed_batch(2, 2, 16, TINY.vocab_size)
    other = dict(batch, inputs=np.where(batch["segments"] == 1, 31 - batch["inputs"], batch["inputs"]))
    before, after = logits_of(TINY, params, batch), logits_of(TINY, params, other)
    np.testing.assert_array_equal(before[batch["segments"] == 2], after[batch["segments"] == 2])
    assert np.abs(before - after)[batch["segments"] == 1].max() > 1e-3


def test_later_tokens_change_nothing():
    params, batch = random_parameters(TINY), packed_batch(3, 1, 16, TINY.vocab_size)
    whole = {name: np.ones_like(leaf) for name, leaf in batch.items()}
    whole["positions"] = np.arange(16, dtype=np.int32)[None]
    later = dict(whole, inputs=np.where(np.arange(16) >= 9, 5, whole["inputs"]))
    before, after = logits_of(TINY, params, whole), logits_of(TINY, params, later)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert np.abs(before - after)[:, 9:].max() > 1e-3


def test_a_document_reads_the_same_wherever_it_stands_in_its_row():
    params, rng = random_parameters(TINY), np.random.default_rng(0)
    document = rng.integers(0, 32, 6)
    rows = {name: np.zeros((2, 16), np.int32) for name in ("inputs", "positions", "segments")}
    rows["inputs"][:] = rng.integers(0, 32, (2, 16))
    for row, start in enumerate((0, 7)):
        rows["inputs"][row, start : start + 6] = document
        rows["positions"][row, start : start + 6] = np.arange(6)
        rows["segments"][row, start : start + 6] = 2
    logits = logits_of(TINY, params, rows)
    np.testing.assert_allclose(logits[0, :6], logits[1, 7:13], rtol=1e-5, atol=1e-5)


def test_grouped_heads_equal_full_heads_with_repeated_keys_and_values():
    params, batch = random_parameters(TINY), packed_batch(4, 2, 12, TINY.vocab_size)
    full = dataclasses.replace(TINY, num_kv_heads=TINY.num_heads)
    repeated = {
        name: jnp.repeat(leaf, 2, axis=1) if "/key/" in name or "/value/" in name else leaf
        for name, leaf in params.items()
    }
    np.testing.assert_allclose(
        logits_of(TINY, params, batch), logits_of(full, repeated, batch), rtol=1e-5, atol=1e-5
    )


def test_a_tied_head_has_no_parameters_and_is_the_transposed_embedding():
    tied = dataclasses.replace(TINY, tie_embeddings=True)
    params, batch = random_parameters(tied), packed_batch(5, 2, 12, TINY.vocab_size)
    assert not any(name.startswith("head") for name in params)
    untied = dict(params, **{"head/kernel": params["embed/embedding"].T})
    np.testing.assert_allclose(
        logits_of(tied, params, batch), logits_of(TINY, untied, batch), rtol=1e-6, atol=1e-6
    )


def test_remat_changes_neither_loss_nor_gradient_and_does_recompute():
    params, batch = random_parameters(TINY), packed_batch(6, 2, 12, TINY.vocab_size)
    rematted = dataclasses.replace(TINY, remat=True)
    gradient = jax.jit(
        jax.value_and_grad(lambda params, config: next_token_loss(config, params, batch).objective),
        static_argnums=1,
    )
    plain_loss, plain = gradient(params, TINY)
    remat_loss, remat = gradient(params, rematted)
    np.testing.assert_allclose(plain_loss, remat_loss, rtol=1e-6)
    for name in plain:
        np.testing.assert_allclose(plain[name], remat[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert str(gradient.trace(params, rematted).jaxpr).count("remat") >= TINY.num_layers
    assert "remat" not in str(gradient.trace(params, TINY).jaxpr)


def test_bfloat16_computes_near_float32_and_keeps_float32_parameters_and_logits():
    narrow = dataclasses.replace(TINY, compute_dtype="bfloat16")
    params, batch = init_parameters(TINY, 0), packed_batch(7, 2, 12, TINY.vocab_size)
    assert {leaf.dtype for leaf in init_parameters(narrow, 0).values()} == {jnp.dtype("float32")}
    logits = logits_of(narrow, params, batch)
    assert logits.dtype == np.float32
    difference = np.abs(logits - logits_of(TINY, params, batch)).max()
    assert 1e-6 < difference < 0.1


def test_fresh_parameters_predict_about_evenly():
    config = dataclasses.replace(TINY, model_dim=64, vocab_size=256)
    batch = packed_batch(8, 8, 32, 256)
    sums = jax.jit(next_token_loss, static_argnums=0)(config, init_parameters(config, 0), batch)
    assert np.log(256) - 0.1 < float(sums.nll / sums.tokens) < np.log(256) + 1.0


def test_flops_are_six_a_weight_in_a_matmul_and_twelve_for_attention():
    in_matmuls = num_parameters(TINY) - 32 * 16 - (2 * 16 + 2 * 4) * 2 - 16
    attention = 12 * TINY.num_layers * TINY.num_heads * TINY.head_dim * 100
    assert flops_per_token(TINY, 100) == 6 * in_matmuls + attention
    tied = dataclasses.replace(TINY, tie_embeddings=True)
    assert flops_per_token(tied, 100) == flops_per_token(TINY, 100)


def test_the_registry_finds_the_model_of_settings():
    assert model_of(build(MODELS["dense"].config, {"num_layers": 1})) is MODELS["dense"]
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
        ({"activation": "relu"}, "model.activation: is 'relu', but must be one of swiglu, geglu"),
    ],
)
def test_settings_that_do_not_fit_are_told_in_a_line(values, told):
    with pytest.raises(ConfigError) as raised:
        build(DenseConfig, values, "model")
    assert str(raised.value) == told
