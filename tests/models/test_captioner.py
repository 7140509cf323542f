"""The captioner against a float64 reference, and exact match against real decoding."""

import dataclasses

import jax
import numpy as np
import pytest

from ddiloco.config import ConfigError, build
from ddiloco.models.captioner import CaptionerConfig
from ddiloco.training.loss import caption_loss
from ddiloco.training.parameters import forward
from ddiloco.training.sampling import write_captions
from tests.models.decoder_reference import gated_mlp, rms_norm, rotate, under
from tests.models.parameters import random_parameters
from tests.refusals import refusal

TINY = CaptionerConfig(
    vocab_size=11,
    num_layers=2,
    model_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=32,
    image_height=4,
    image_width=6,
    patch_size=2,
    pixel_mean=(0.4,),
    pixel_std=(0.3,),
    compute_dtype="float32",
)
BOS, EOS = 9, 10


def captioned_images(rows, length, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, BOS, (rows, length + 1)).astype(np.int32)
    tokens[:, 0] = BOS
    return {
        "image": rng.integers(0, 256, (rows, 4, 6, 1), np.uint8),
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": (np.arange(length) < rng.integers(1, length + 1, (rows, 1))).astype(np.int32),
    }


def logits_of(config, params, batch):
    return np.asarray(jax.jit(forward, static_argnums=0)(config, params, batch["image"], batch["inputs"]))


def attend(params, config, x_SxD, num_patches):
    out_SxD = np.zeros_like(x_SxD)
    for head in range(config.num_heads):
        shared = head // (config.num_heads // config.num_kv_heads)
        query, key = x_SxD @ params["query/kernel"][:, head], x_SxD @ params["key/kernel"][:, shared]
        query = rms_norm(query, params["query_norm/scale"], config.norm_epsilon)
        key = rms_norm(key, params["key_norm/scale"], config.norm_epsilon)
        places = np.arange(len(x_SxD))
        query, key = rotate(query, places, config.rope_theta), rotate(key, places, config.rope_theta)
        value = x_SxD @ params["value/kernel"][:, shared]
        for i in places:
            seen = [j for j in places if j < num_patches or j <= i]
            weights = np.exp([query[i] @ key[j] / np.sqrt(config.head_dim) for j in seen])
            out_SxD[i] += (weights / weights.sum()) @ value[seen] @ params["out/kernel"][head]
    return out_SxD


def reference(params, config, batch):
    """Logits (B, L, V) float64."""
    params = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    rows, side = [], config.patch_size
    for image, inputs in zip(batch["image"].astype(np.float64), batch["inputs"], strict=True):
        pixels = (image / 255 - config.pixel_mean[0]) / config.pixel_std[0]
        cut = [
            pixels[top : top + side, left : left + side].reshape(-1)
            for top in range(0, config.image_height, side)
            for left in range(0, config.image_width, side)
        ]
        image_IxD = np.stack(cut) @ params["embed_image/kernel"] + params["embed_image/bias"]
        text_LxD = params["embed/embedding"][inputs] * np.sqrt(config.model_dim)
        x_SxD = np.concatenate([image_IxD + params["embed_image/places"], text_LxD])
        for number in range(config.num_layers):
            layer = under(params, f"layers/{number}/")
            normed = rms_norm(x_SxD, layer["attention_norm/scale"], config.norm_epsilon)
            x_SxD = x_SxD + attend(under(layer, "attention/"), config, normed, config.num_patches)
            normed = rms_norm(x_SxD, layer["mlp_norm/scale"], config.norm_epsilon)
            x_SxD = x_SxD + gated_mlp(under(layer, "mlp/"), config, normed)
        x_LxD = rms_norm(x_SxD[config.num_patches :], params["final_norm/scale"], config.norm_epsilon)
        rows.append(x_LxD @ params["head/kernel"])
    return np.stack(rows)


def test_forward_is_the_float64_reference():
    config = dataclasses.replace(TINY, scan_layers=True)
    params, batch = random_parameters(config), captioned_images(3, 5)
    expected = reference(params, config, batch)
    np.testing.assert_allclose(logits_of(config, params, batch), expected, rtol=1e-5, atol=1e-5)


def test_exact_match_counts_just_the_captions_that_greedy_decoding_writes():
    params, batch = random_parameters(TINY, deviation=0.6), captioned_images(8, 6, seed=2)
    written = write_captions(TINY, params, batch["image"], 6, BOS, EOS)
    assert written.shape == (8, 6)
    targets = written.copy()
    targets[1::2, 3] = (targets[1::2, 3] + 1) % BOS  # every other caption has a fault
    inputs = np.concatenate([np.full((8, 1), BOS), targets[:, :-1]], axis=1).astype(np.int32)
    weights = np.ones_like(targets)
    weights[0] = 0  # of a row that is padding
    weights[2, 4:] = 0  # what does not count may be anything
    targets[2, 4:] = 7
    sums = jax.jit(caption_loss, static_argnums=0)(
        dataclasses.replace(TINY, logits_chunk=32),
        params,
        dict(batch, inputs=inputs, targets=targets, weights=weights),
    )
    assert (sums.model["correct"], sums.model["answers"], sums.tokens) == (3, 7, weights.sum())


def test_greedy_decoding_takes_the_likeliest_token_and_stays_at_the_end():
    params, images = random_parameters(TINY, deviation=0.6), captioned_images(4, 5)["image"]
    first = logits_of(TINY, params, {"image": images, "inputs": np.full((4, 5), BOS, np.int32)})[:, 0]
    written = write_captions(TINY, params, images, 5, BOS, EOS)
    np.testing.assert_array_equal(written[:, 0], first.argmax(axis=-1))
    ending = int(written[0, 1])  # let the second token of the first image be the one that ends
    again = write_captions(TINY, params, images, 5, BOS, ending)
    end = int(np.argmax(again[0] == ending))
    assert end <= 1 and (again[0, end:] == ending).all()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"patch_size": 8}, "model.patch_size: is 8, but must be a divisor of image_height 12"),
        ({"image_width": 30}, "model.patch_size: is 4, but must be a divisor of image_width 30"),
        (
            {"attention": "splash"},
            "model.attention: is splash, which is for text alone, but must be auto, xla or cudnn",
        ),
    ],
)
def test_settings_that_do_not_fit_are_told_in_a_line(values, told):
    assert refusal(ConfigError, build, CaptionerConfig, values, "model") == told
    assert dataclasses.replace(TINY).num_patches == 6
