"""AdamW by the learner's clock: schedule, decay, clipping, against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ddiloco.models.captioner import CaptionerConfig
from ddiloco.models.vit import ViTConfig
from ddiloco.training.inner_optimizer import (
    InnerConfig,
    clip_factor,
    decay_mask,
    learning_rate_at,
    make_inner_optimizer,
)
from ddiloco.training.parameters import abstract_parameters
from tests.training.batches import TINY

CONFIG = InnerConfig(learning_rate=0.5, warmup_steps=10, final_fraction=0.2)


@pytest.mark.parametrize(
    ("clock", "expected"),
    [
        (0, 0.05),
        (9, 0.5),
        (10, 0.5),
        (35, 0.5 * (0.2 + 0.8 * (0.5 + 0.5 * np.cos(np.pi / 4)))),
        (110, 0.1),
    ],
)
def test_learning_rate_warms_up_falls_by_a_cosine_and_stays(clock, expected):
    assert float(learning_rate_at(CONFIG, 110, clock)) == pytest.approx(expected, rel=1e-6)


def test_a_clock_jump_moves_the_rate_but_not_the_bias_correction():
    config = InnerConfig(learning_rate=0.5, warmup_steps=10, weight_decay=0.0, clip_norm=None)
    optimizer = make_inner_optimizer(config, {})
    params = {"w": jnp.zeros((2, 2))}
    state = optimizer.init(params)
    gradients = {"w": jnp.full((2, 2), 3.0)}
    for clock in (0, 1, 80):
        rate = learning_rate_at(config, 100, clock)
        updates, state = optimizer.update(gradients, state, params, rate=rate)
        # A constant gradient leaves Adam, once its bias is corrected by its own count, with a unit step.
        np.testing.assert_allclose(updates["w"], np.full((2, 2), -rate), rtol=1e-5)


def test_what_is_compiled_serves_every_schedule():
    params = {"w": jnp.zeros((2, 2))}

    def program(**schedule):
        optimizer = make_inner_optimizer(InnerConfig(**schedule), {})
        state = optimizer.init(params)
        return jax.jit(optimizer.update).lower(params, state, params, rate=np.float32(1.0)).as_text()

    assert program(learning_rate=0.5, warmup_steps=3, final_fraction=0.0) == program()
    assert program(weight_decay=0.2) != program()


def test_matrices_decay_norms_and_the_embedding_do_not():
    shapes = abstract_parameters(dataclasses.replace(TINY, scan_layers=True))
    spared = {name for name, decays in decay_mask(shapes).items() if not decays}
    assert spared == {"embed/embedding"} | {name for name in shapes if name.endswith("scale")}
    assert decay_mask(shapes)["head/kernel"]


def test_all_embeddings_are_spared_those_of_pictures_and_one_without_parts_too():
    shapes = abstract_parameters(CaptionerConfig())
    kept = {name for name, decays in decay_mask(shapes).items() if not decays}
    assert {"embed/embedding", "embed_image/kernel", "embed_image/places"} <= kept
    table = jax.ShapeDtypeStruct((3, 4), np.float32)
    assert not decay_mask({"embed": table})["embed"]


def test_biases_do_not_decay_whatever_their_axes():
    shapes = abstract_parameters(ViTConfig())
    decaying = {name for name, decays in decay_mask(shapes).items() if decays}
    assert "layers/0/attention/query/bias" in shapes
    assert decaying == {
        name for name in shapes if name.endswith("/kernel") and name.startswith(("layers/", "head/"))
    }


@pytest.mark.parametrize("share", [None, 0.0, 0.3])
def test_ten_steps_are_the_float64_adamw(share):
    config = InnerConfig(
        learning_rate=0.1, warmup_steps=3, final_fraction=0.0, weight_decay=0.3, b1=0.8, b2=0.9, clip_norm=2.0
    )
    config = dataclasses.replace(config, gradient_share=share)
    rng = np.random.default_rng(0)
    optimizer = make_inner_optimizer(config, {})
    params = {"head/kernel": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)}
    state = optimizer.init(params)
    expected = np.asarray(params["head/kernel"], np.float64)
    first, second = np.zeros((3, 4)), np.zeros((3, 4))
    for clock in range(10):
        gradient = rng.normal(size=(3, 4))
        clipped = gradient * clip_factor(config, np.linalg.norm(gradient))
        updates, state = optimizer.update(
            {"head/kernel": jnp.asarray(clipped, jnp.float32)},
            state,
            params,
            rate=learning_rate_at(config, 12, clock),
        )
        params = optax.apply_updates(params, updates)
        gradient = gradient * min(1.0, 2.0 / np.linalg.norm(gradient))
        first = 0.8 * first + 0.2 * gradient
        second = 0.9 * second + 0.1 * gradient**2
        unbiased = first / (1 - 0.8 ** (clock + 1))
        direction = unbiased + (share or 0.0) * (gradient - unbiased)  # quasi-hyperbolic momentum
        step = direction / (np.sqrt(second / (1 - 0.9 ** (clock + 1))) + 1e-8)
        progress = min(max((clock - 3) / 9, 0.0), 1.0)
        rate = 0.1 * min(1.0, (clock + 1) / 3) * (0.5 + 0.5 * np.cos(np.pi * progress))
        expected = expected - rate * (step + 0.3 * expected)
    np.testing.assert_allclose(params["head/kernel"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_moment_may_be_kept_in_half_the_bits(dtype):
    optimizer = make_inner_optimizer(InnerConfig(mu_dtype=dtype), {})
    (adam,) = [part for part in optimizer.init({"w": jnp.ones((4, 4))}) if hasattr(part, "mu")]
    assert (adam.mu["w"].dtype, adam.nu["w"].dtype) == (jnp.dtype(dtype), jnp.float32)
