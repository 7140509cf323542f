"""The vision transformer (arXiv 2010.11929): an image in, logits of its class out.

Suffixes give the shapes of arrays: B images, L patches (and the class token, where there is one), D
model_dim, N heads, H head_dim, F mlp_dim, P pixels of a patch times channels, C classes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ddiloco.config import setting
from ddiloco.models import stack
from ddiloco.models.dense import Projection
from ddiloco.models.model import Model
from ddiloco.models.parameter import Constant, Constrain, Normal, parameter, unconstrained


@dataclasses.dataclass(frozen=True)
class ViTConfig(stack.LayersConfig):
    """The shape of a vision transformer and the type of its activations; parameters are always float32."""

    image_size: int = setting(8, "height and width of an image, pixels", at_least=1)
    channels: int = setting(1, "1: grey, 3: red, green and blue", choices=(1, 3))
    num_classes: int = setting(10, "classes", at_least=2)
    patch_size: int = setting(2, "height and width of a patch, pixels; a divisor of image_size", at_least=1)
    num_layers: int = setting(4, "transformer layers", at_least=1)
    model_dim: int = setting(64, "width of the residual stream", at_least=1)
    num_heads: int = setting(4, "attention heads; a divisor of model_dim", at_least=1)
    mlp_dim: int = setting(128, "width of the MLP", at_least=1)
    activation: str = setting(
        "gelu_tanh", "of the MLP; gelu_tanh: GELU by a tanh", choices=("gelu_tanh", "gelu")
    )
    positions: str = setting(
        "sincos", "what is added to a patch for its place", choices=("learned", "sincos")
    )
    pooling: str = setting(
        "mean", "what the head reads: the mean of the patches, or a class token", choices=("mean", "token")
    )
    pixel_mean: tuple[float, ...] = setting((0.3,), "of pixels in [0, 1], for all channels or by channel")
    pixel_std: tuple[float, ...] = setting((0.38,), "the same, standard deviation", above=0.0)
    norm_epsilon: float = setting(1e-6, "added to the variance in LayerNorm", above=0.0)
    compute_dtype: str = setting("float32", "type of activations", choices=("bfloat16", "float32"))
    attention: str = setting(
        "xla",
        "implementation of attention; cudnn: on GPUs",
        choices=("xla", "cudnn"),
        both_ends=False,
        may_change="resume",
    )

    def __post_init__(self) -> None:
        if self.image_size % self.patch_size:
            raise ValueError(
                f"patch_size: is {self.patch_size}, but must be a divisor of image_size {self.image_size}"
            )
        if self.model_dim % self.num_heads:
            raise ValueError(
                f"num_heads: is {self.num_heads}, but must be a divisor of model_dim {self.model_dim}"
            )
        if self.positions == "sincos" and self.model_dim % 4:
            raise ValueError(f"model_dim: is {self.model_dim}, but positions sincos need a multiple of 4")
        check_pixels(self)
        if self.attention == "cudnn" and self.compute_dtype != "bfloat16":
            raise ValueError("attention: is cudnn, but that needs compute_dtype bfloat16")
        if self.attention == "cudnn" and self.model_dim % (8 * self.num_heads):
            wanted = f"a multiple of {8 * self.num_heads} for cudnn, 8 for each head"
            raise ValueError(f"model_dim: is {self.model_dim}, but must be {wanted}")
        self.check_repeats("num_layers", self.num_layers)

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2


def check_pixels(config: Any) -> None:
    """Raises ValueError unless the pixels' mean and deviation are for all channels or one a channel."""
    for name in ("pixel_mean", "pixel_std"):
        count = len(getattr(config, name))
        if count not in (1, config.channels):
            raise ValueError(f"{name}: has {count} entries, but must have 1 or one a channel")


class LayerNorm(nnx.Module):
    """Normalises the last axis to mean 0 and variance 1, in float32, then scales and shifts it."""

    def __init__(self, rngs: nnx.Rngs, dim: int, epsilon: float) -> None:
        self.scale = parameter(rngs, (dim,), ("embed",), Constant(1.0))
        self.bias = parameter(rngs, (dim,), ("embed",), Constant(0.0))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt(variance + self.epsilon)
        return (scaled * self.scale[...] + self.bias[...]).astype(x.dtype)


class _Attention(nnx.Module):
    """Multi-head attention of every patch to every patch."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs) -> None:
        c, head_dim = config, config.model_dim // config.num_heads
        stddev = c.model_dim**-0.5
        shape, axes = (c.model_dim, c.num_heads, head_dim), ("embed", "heads", "head_dim")
        self.query = Projection(rngs, "rd,dnh->rnh", shape, axes, stddev, c.compute_dtype, bias_axes=2)
        # A bias of the keys would add the same to all scores of a query: it has no gradient but rounding.
        self.key = Projection(rngs, "rd,dnh->rnh", shape, axes, stddev, c.compute_dtype)
        self.value = Projection(rngs, "rd,dnh->rnh", shape, axes, stddev, c.compute_dtype, bias_axes=2)
        out_shape, out_axes = (c.num_heads, head_dim, c.model_dim), ("heads", "head_dim", "embed")
        out_stddev = stddev / math.sqrt(2 * c.num_layers)
        self.out = Projection(
            rngs, "rnh,nhd->rd", out_shape, out_axes, out_stddev, c.compute_dtype, bias_axes=1
        )
        self.implementation: Any = c.attention  # JAX has a literal type for it

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        seen_BxLxNxH = jax.nn.dot_product_attention(
            self.query(x_BxLxD), self.key(x_BxLxD), self.value(x_BxLxD), implementation=self.implementation
        )
        return self.out(seen_BxLxNxH)


class MLP(nnx.Module):
    """down(gelu(up(x)))."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs) -> None:
        c = config
        up_shape, up_axes = (c.model_dim, c.mlp_dim), ("embed", "mlp")
        self.up = Projection(
            rngs, "rd,df->rf", up_shape, up_axes, c.model_dim**-0.5, c.compute_dtype, bias_axes=1
        )
        down_stddev = c.mlp_dim**-0.5 / math.sqrt(2 * c.num_layers)
        self.down = Projection(
            rngs, "rf,fd->rd", up_shape[::-1], up_axes[::-1], down_stddev, c.compute_dtype, bias_axes=1
        )
        self.approximate = c.activation == "gelu_tanh"

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x_BxLxD), self.approximate))


class _Layer(nnx.Module):
    """Attention, then the MLP, each added to the residual stream after a norm of its input."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = LayerNorm(rngs, config.model_dim, config.norm_epsilon)
        self.attention = _Attention(config, rngs)
        self.mlp_norm = LayerNorm(rngs, config.model_dim, config.norm_epsilon)
        self.mlp = MLP(config, rngs)

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        x_BxLxD = x_BxLxD + self.attention(self.attention_norm(x_BxLxD))
        return x_BxLxD + self.mlp(self.mlp_norm(x_BxLxD))


def patches(image_BxHxWxC: jax.Array, patch_size: int) -> jax.Array:
    """The patches (B, L, P) of images, row by row; pixels of a patch likewise, channels last."""
    batch, height, width, channels = image_BxHxWxC.shape
    rows, columns = height // patch_size, width // patch_size
    cut = image_BxHxWxC.reshape(batch, rows, patch_size, columns, patch_size, channels)
    return jnp.swapaxes(cut, 2, 3).reshape(batch, rows * columns, patch_size * patch_size * channels)


def normalised(image: jax.Array, mean: tuple[float, ...], std: tuple[float, ...]) -> jax.Array:
    """Pixels (..., C) uint8 as float32: scaled to [0, 1], less the mean, over the standard deviation."""
    return (image.astype(jnp.float32) / 255 - jnp.asarray(mean)) / jnp.asarray(std)


def sincos_positions(rows: int, columns: int, dim: int) -> np.ndarray:
    """Fixed position embeddings (rows * columns, dim) float32 of a grid, of wavelengths up to 10,000.

    As in MoCo v3 (arXiv 2104.02057): a quarter of the width each for sine and cosine of the row and of the
    column.
    """
    frequency = 10_000.0 ** (-np.arange(dim // 4) / (dim // 4))
    row, column = np.divmod(np.arange(rows * columns), columns)
    angles = [place[:, None] * frequency for place in (row, column)]
    parts = [turn(angle) for angle in angles for turn in (np.sin, np.cos)]
    return np.concatenate(parts, axis=1).astype(np.float32)


class _Embedding(nnx.Module):
    """A linear map of each patch plus an embedding of its place; before them, a class token if configured."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs) -> None:
        c, pixels = config, config.patch_size**2 * config.channels
        shape, axes = (pixels, c.model_dim), (None, "embed")
        self.patches = Projection(rngs, "rp,pd->rd", shape, axes, pixels**-0.5, c.compute_dtype, bias_axes=1)
        if c.positions == "learned":
            self.positions = parameter(rngs, (c.num_patches, c.model_dim), (None, "embed"), Normal(0.02))
        if c.pooling == "token":
            self.token = parameter(rngs, (c.model_dim,), ("embed",), Normal(0.02))
        self.config = config

    def __call__(self, image_BxHxWxC: jax.Array) -> jax.Array:
        c = self.config
        pixels = normalised(image_BxHxWxC, c.pixel_mean, c.pixel_std)
        x_BxLxD = self.patches(patches(pixels, c.patch_size).astype(c.compute_dtype))
        side = c.image_size // c.patch_size
        learned = c.positions == "learned"
        places_LxD = self.positions[...] if learned else sincos_positions(side, side, c.model_dim)
        x_BxLxD = x_BxLxD + jnp.asarray(places_LxD, c.compute_dtype)
        if c.pooling == "token":
            token = jnp.broadcast_to(self.token[...].astype(c.compute_dtype), (len(x_BxLxD), 1, c.model_dim))
            x_BxLxD = jnp.concatenate([token, x_BxLxD], axis=1)
        return x_BxLxD


class ViT(nnx.Module):
    """The whole model: images (B, H, W, C) uint8 in, float32 logits of their classes out."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs) -> None:
        c = config
        self.config = c
        self.embed = _Embedding(c, rngs)
        layers = stack.layers(lambda number: _Layer(c, rngs), 0, c.num_layers, c)
        self.layers = nnx.Dict(layers)
        self.final_norm = LayerNorm(rngs, c.model_dim, c.norm_epsilon)
        shape, stddev = (c.model_dim, c.num_classes), c.model_dim**-0.5
        self.head = Projection(
            rngs, "rd,dc->rc", shape, ("embed", "vocab"), stddev, c.compute_dtype, bias_axes=1
        )

    def __call__(self, image_BxHxWxC: jax.Array, constrain: Constrain = unconstrained) -> jax.Array:
        """Logits (B, C) float32; `constrain` pins activations to the layout of their logical axes."""

        def caller(constrain: Constrain) -> stack.Call:
            return lambda layer, x_BxLxD: (constrain(layer(x_BxLxD), ("batch", None, None)), None)

        x_BxLxD = constrain(self.embed(image_BxHxWxC), ("batch", None, None))
        x_BxLxD, _ = stack.run(self.layers, caller, x_BxLxD, (), constrain, self.config)
        x_BxLxD = self.final_norm(x_BxLxD)
        pooled_BxD = x_BxLxD[:, 0] if self.config.pooling == "token" else jnp.mean(x_BxLxD, axis=1)
        return constrain(self.head(pooled_BxD, output_dtype="float32"), ("batch", "vocab"))


def flops_per_token(config: ViTConfig, seq_len: int) -> float:
    """Floating-point operations of one training step for each image, which counts as one token.

    Six for each weight at each place where it is used, and 12 * layers * model_dim * places^2 for attention.
    """
    del seq_len
    c = config
    places = c.num_patches + (c.pooling == "token")
    layer = 4 * c.model_dim**2 + 2 * c.model_dim * c.mlp_dim
    embedding = c.num_patches * c.patch_size**2 * c.channels * c.model_dim
    weights = places * c.num_layers * layer + embedding + c.model_dim * c.num_classes
    return 6.0 * weights + 12.0 * c.num_layers * c.model_dim * places**2


MODEL = Model(ViTConfig, ViT, flops_per_token, task="classification")
