"""The vision transformer against a float64 reference; its loss, its count of operations, its settings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddiloco.config import ConfigError, build
from ddiloco.models.vit import ViTConfig, flops_per_token
from ddiloco.training.loss import label_loss, statistics
from ddiloco.training.parameters import forward, num_parameters
from tests.models.parameters import random_parameters
from tests.models.vit_reference import classify
from tests.refusals import refusal

TINY = ViTConfig(
    image_size=6,
    channels=3,
    num_classes=5,
    patch_size=3,
    num_layers=2,
    model_dim=16,
    num_heads=4,
    mlp_dim=24,
    pixel_mean=(0.5, 0.4, 0.3),
    pixel_std=(0.2, 0.3, 0.4),
    compute_dtype="float32",
)


def labelled_images(config, rows, seed=0):
    rng = np.random.default_rng(seed)
    shape = (rows, config.image_size, config.image_size, config.channels)
    return {
        "image": rng.integers(0, 256, shape, np.uint8),
        "label": rng.integers(0, config.num_classes, rows).astype(np.int32),
        "weights": np.ones(rows, np.int32),
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"positions": "sincos", "pooling": "token", "scan_layers": True, "remat": "full"},
        {"channels": 1, "pixel_mean": (0.3,), "pixel_std": (0.4,), "image_size": 9},
    ],
    ids=["learned_mean", "sincos_token_scanned", "grey"],
)
def test_forward_is_the_float64_reference(changes):
    config = dataclasses.replace(TINY, **changes)
    params, images = random_parameters(config), labelled_images(config, 3)["image"]
    logits = jax.jit(forward, static_argnums=0)(config, params, images)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, classify(params, config, images), rtol=1e-5, atol=1e-5)


def test_the_loss_is_the_mean_of_log_probabilities_and_padding_does_not_count():
    params, batch = random_parameters(TINY), labelled_images(TINY, 6)
    batch["weights"][4:] = 0
    sums = jax.jit(label_loss, static_argnums=(0, 3))(TINY, params, batch, 0.0)
    logits = classify(params, TINY, batch["image"][:4])
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    label = batch["label"][:4]
    assert sums.nll == pytest.approx(-log_probabilities[np.arange(4), label].sum(), rel=1e-5)
    assert (sums.tokens, sums.objective) == (4, sums.nll)
    told = statistics(TINY, sums)
    assert told["accuracy"] == pytest.approx(np.mean(logits.argmax(axis=1) == label))


def test_accuracy_without_any_answer_is_zero_and_no_error():
    params, batch = random_parameters(TINY), labelled_images(TINY, 2)
    batch["weights"][:] = 0
    sums = jax.jit(label_loss, static_argnums=0)(TINY, params, batch)
    assert statistics(TINY, sums)["accuracy"] == 0


def test_parameters_and_operations_are_those_of_the_published_base_model():
    base = ViTConfig(
        image_size=224,
        channels=3,
        num_classes=1000,
        patch_size=16,
        num_layers=12,
        model_dim=768,
        num_heads=12,
        mlp_dim=3072,
        positions="learned",
        pooling="token",
    )
    # Published with a place of the class token and biases of the keys, neither of which changes anything.
    assert num_parameters(base) == 86_567_656 - 768 - 12 * 768
    # 17.6e9 multiply-adds forward, as usually given; three times two operations with the backward pass.
    assert flops_per_token(base, 1) == pytest.approx(6 * 17.6e9, rel=0.01)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"patch_size": 3}, "model.patch_size: is 3, but must be a divisor of image_size 8"),
        ({"num_heads": 3}, "model.num_heads: is 3, but must be a divisor of model_dim 64"),
        (
            {"model_dim": 66, "num_heads": 2, "positions": "sincos"},
            "model.model_dim: is 66, but positions sincos need a multiple of 4",
        ),
        ({"pixel_std": (0.1, 0.2)}, "model.pixel_std: has 2 entries, but must have 1 or one a channel"),
        ({"channels": 2}, "model.channels: is 2, but must be one of 1, 3"),
        (
            {"attention": "cudnn", "compute_dtype": "bfloat16", "model_dim": 48},
            "model.model_dim: is 48, but must be a multiple of 32 for cudnn, 8 for each head",
        ),
    ],
)
def test_settings_that_do_not_fit_are_told_in_a_line(values, told):
    assert refusal(ConfigError, build, ViTConfig, values, "model") == told
