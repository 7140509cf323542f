"""The vision transformer as transformers has it, ViTForImageClassification."""

from __future__ import annotations

import numpy as np

from ddiloco.models.vit import ViTConfig
from ddiloco.training.parameters import parameter_shapes
from ddiloco.weights.counterpart import CONFIG, PREPROCESSOR, Counterpart, Field, Ours, Table, Theirs, needs

ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu"}
_EMBEDDINGS = "vit.embeddings"


def vit(config: ViTConfig) -> Counterpart:
    """The vision transformer as ViTForImageClassification."""
    differences = needs(config, "ViT", pooling="token", positions="learned")
    table = Table(parameter_shapes(config), ["vit.pooler.dense.weight", "vit.pooler.dense.bias"])
    if not differences:
        _embeddings(table, config)
    for number in range(config.num_layers):
        _layer(table, config, number)
    _biased(table, "final_norm/scale", "vit.layernorm")
    table.linear("head/kernel", "classifier.weight")
    table.same("head/bias", "classifier.bias")
    labels = [f"LABEL_{number}" for number in range(config.num_classes)]
    more = {
        "model_type": "vit",
        "id2label": dict(enumerate(labels)),
        "label2id": {label: number for number, label in enumerate(labels)},
    }
    scaling = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
    size = {"height": config.image_size, "width": config.image_size}
    images = {"image_processor_type": "ViTImageProcessor", "do_resize": True, "size": size, **scaling}
    files = {CONFIG: _fields(config), PREPROCESSOR: _pixels(config)}
    return Counterpart(
        "ViTForImageClassification", differences, files, {CONFIG: more, PREPROCESSOR: images}, table
    )


def _fields(config: ViTConfig) -> tuple[Field, ...]:
    c = config
    return (
        Field("image_size", c.image_size, "image_size", 224),
        Field("patch_size", c.patch_size, "patch_size", 16),
        Field("num_channels", c.channels, "channels", 3),
        Field("hidden_size", c.model_dim, "model_dim", 768),
        Field("num_hidden_layers", c.num_layers, "num_layers", 12),
        Field("num_attention_heads", c.num_heads, "num_heads", 12),
        Field("intermediate_size", c.mlp_dim, "mlp_dim", 3072),
        Field("hidden_act", ACTIVATIONS[c.activation], "activation", "gelu"),
        Field("layer_norm_eps", c.norm_epsilon, "norm_epsilon", 1e-12),
        Field("qkv_bias", True, None, True),
    )


def _pixels(config: ViTConfig) -> tuple[Field, ...]:
    by_channel = {
        name: list(values) * (config.channels // len(values))
        for name, values in (("pixel_mean", config.pixel_mean), ("pixel_std", config.pixel_std))
    }
    return (
        Field("image_mean", by_channel["pixel_mean"], "pixel_mean", [0.5] * 3),
        Field("image_std", by_channel["pixel_std"], "pixel_std", [0.5] * 3),
    )


def _embeddings(table: Table, config: ViTConfig) -> None:
    size, channels, width = config.patch_size, config.channels, config.model_dim
    their_shape, our_shape = (width, channels, size, size), (size, size, channels, width)
    ours, theirs = "embed/patches/kernel", f"{_EMBEDDINGS}.patch_embeddings.projection.weight"
    table.theirs[theirs] = Theirs(their_shape, ours, lambda x: x.reshape(our_shape).transpose(3, 2, 0, 1))
    table.ours[ours] = Ours((theirs,), lambda x: x.transpose(2, 3, 1, 0).reshape(-1, width))
    table.same("embed/patches/bias", f"{_EMBEDDINGS}.patch_embeddings.projection.bias")
    # Their class token has a place among the positions; ours is the sum of the two.
    token, places = f"{_EMBEDDINGS}.cls_token", f"{_EMBEDDINGS}.position_embeddings"
    nowhere = np.zeros((1, width), np.float32)
    with_token = (1, config.num_patches + 1, width)
    table.theirs[token] = Theirs((1, 1, width), "embed/token", lambda x: x.reshape(1, 1, width))
    table.theirs[places] = Theirs(with_token, "embed/positions", lambda x: np.concatenate([nowhere, x])[None])
    table.ours["embed/token"] = Ours((token, places), lambda x, at: x[0, 0] + at[0, 0])
    table.ours["embed/positions"] = Ours((places,), lambda at: at[0, 1:])


def _layer(table: Table, config: ViTConfig, number: int) -> None:
    ours, theirs = f"layers/{number}", f"vit.encoder.layer.{number}"
    _biased(table, f"{ours}/attention_norm/scale", f"{theirs}.layernorm_before")
    _biased(table, f"{ours}/mlp_norm/scale", f"{theirs}.layernorm_after")
    width = (config.model_dim,)
    for name in ("query", "key", "value"):
        theirs_of = f"{theirs}.attention.attention.{name}"
        table.linear(f"{ours}/attention/{name}/kernel", f"{theirs_of}.weight", outputs=2)
        if name != "key":
            table.same(f"{ours}/attention/{name}/bias", f"{theirs_of}.bias", width)
    # It would add the same to all scores of a query, which changes no weight of the softmax.
    table.zero(f"{theirs}.attention.attention.key.bias", width)
    for name, theirs_of in (
        ("attention/out", "attention.output.dense"),
        ("mlp/up", "intermediate.dense"),
        ("mlp/down", "output.dense"),
    ):
        table.linear(f"{ours}/{name}/kernel", f"{theirs}.{theirs_of}.weight")
        table.same(f"{ours}/{name}/bias", f"{theirs}.{theirs_of}.bias")


def _biased(table: Table, scale: str, theirs: str) -> None:
    """A LayerNorm."""
    table.same(scale, f"{theirs}.weight")
    table.same(scale.replace("/scale", "/bias"), f"{theirs}.bias")
