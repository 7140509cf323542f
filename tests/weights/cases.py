"""The settings of ours for the models that `record.py` made."""

import dataclasses
import pathlib

import jax
import numpy as np

from ddiloco.config import build
from ddiloco.models import MODELS, name_of
from ddiloco.models.vit import normalised
from ddiloco.settings.experiment import parse
from ddiloco.training.parameters import forward

RECORDED = pathlib.Path(__file__).parent / "recorded"
DECODER = {
    "vocab_size": 32,
    "num_layers": 2,
    "model_dim": 12,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "mlp_dim": 20,
    "rope_theta": 500.0,
}
EXPERTS = {"num_experts": 4, "expert_dim": 8, "dense_layers": 1, "capacity_factor": None}
IMAGES = {
    "image_size": 8,
    "patch_size": 4,
    "channels": 3,
    "num_classes": 5,
    "num_layers": 2,
    "model_dim": 12,
    "num_heads": 4,
    "mlp_dim": 20,
    "pooling": "token",
    "positions": "learned",
    "pixel_mean": (0.5,),
    "pixel_std": (0.5,),
}
CASES = {
    "qwen3": ("dense", {**DECODER, "norm_epsilon": 1e-5}),
    "qwen3_tied": ("dense", {**DECODER, "tie_embeddings": True, "activation": "geglu"}),
    "qwen3_moe": ("moe", {**DECODER, **EXPERTS}),
    "vit": ("vit", {**IMAGES, "activation": "gelu", "norm_epsilon": 1e-12}),
}


def model(case, **changes):
    """The settings of a case, with some of them changed."""
    name, settings = CASES[case]
    return build(MODELS[name].config, {**settings, **changes}, "config.model")


def experiment_of(config, **settings):
    """An experiment with a model of these settings."""
    return dataclasses.replace(parse({"model": {"name": name_of(config)}, **settings}), model=config)


def logits(config, params, inputs):
    """Of token ids (B, L), or of images (B, C, H, W) as transformers takes them, uint8."""
    run = jax.jit(forward, static_argnums=0)
    if inputs.ndim == 4:
        return np.asarray(run(config, params, inputs.astype(np.uint8).transpose(0, 2, 3, 1)))
    positions = np.broadcast_to(np.arange(inputs.shape[1], dtype=np.int32), inputs.shape)
    return np.asarray(run(config, params, inputs.astype(np.int32), positions, np.ones_like(positions)))


def pixels(config, images):
    """Images (B, C, H, W) uint8 as transformers' preprocessor leaves them, float32."""
    scaled = normalised(images.transpose(0, 2, 3, 1), config.pixel_mean, config.pixel_std)
    return np.asarray(scaled).transpose(0, 3, 1, 2)
