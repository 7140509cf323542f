"""The dense decoder: pre-norm, rotary positions, grouped-query attention and a gated MLP.

Suffixes give the shapes of arrays: B rows, L positions, D model_dim, N query heads, K key and value heads,
H head_dim, F mlp_dim, V vocab_size.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ddiloco.config import setting
from ddiloco.models import stack
from ddiloco.models.attention import IMPLEMENTATIONS, Attend, causal
from ddiloco.models.model import LazyLogits, Model, Output, whole_logits
from ddiloco.models.parameter import Axes, Constant, Constrain, Normal, parameter, unconstrained


@dataclasses.dataclass(frozen=True)
class DenseConfig(stack.TransformerConfig):
    """The shape of a dense decoder and the type of its activations; parameters are always float32."""

    vocab_size: int = setting(259, "tokens in the vocabulary", at_least=2)
    model_dim: int = setting(128, "width of the residual stream", at_least=1)
    num_kv_heads: int = setting(2, "key and value heads; a divisor of num_heads", at_least=1)
    head_dim: int = setting(32, "width of one head; even, since rotary embeddings turn pairs", at_least=2)
    mlp_dim: int = setting(352, "width of the gated MLP", at_least=1)
    activation: str = setting("swiglu", "gate of the MLP", choices=("swiglu", "geglu"))
    tie_embeddings: bool = setting(False, "the output head is the transposed embedding")
    scale_embeddings: bool = setting(True, "embeddings are multiplied by sqrt(model_dim) on the way in")
    rope_theta: float = setting(10_000.0, "longest rotary wavelength / 2 pi, in positions", above=1.0)
    logits_chunk: int | None = setting(
        None,
        "as many logits as these tokens of a device have exist at a time, in loss and gradient; None: all",
        at_least=1,
        both_ends=False,
        may_change="resume",
    )
    attention: str = setting(
        "auto",
        "implementation of attention; auto: what suits the devices",
        choices=IMPLEMENTATIONS,
        both_ends=False,
        may_change="resume",
    )

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads: is {self.num_heads}, but must be a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: is {self.head_dim}, but must be even")
        if self.attention == "cudnn" and self.compute_dtype != "bfloat16":
            raise ValueError("attention: is cudnn, but that needs compute_dtype bfloat16")
        if self.attention == "cudnn" and self.head_dim % 8:
            raise ValueError(f"head_dim: is {self.head_dim}, but must be a multiple of 8 for cudnn")
        self.check_repeats("num_layers", self.num_layers)


Cache = list[Any]
"""For each entry of the layers, keys and values (layers, B, S, K, H) of the places seen so far."""


class Projection(nnx.Module):
    """A linear map; `equation` is its einsum, where r is the leading axes of the input, B and L, in one."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        equation: str,
        shape: tuple[int, ...],
        axes: Axes,
        stddev: float,
        dtype: str,
        bias_axes: int = 0,
    ) -> None:
        """`bias_axes`: of the kernel's, the last ones, which the bias has too; 0: there is none."""
        self.kernel = parameter(rngs, shape, axes, Normal(stddev))
        if bias_axes:
            self.bias = parameter(rngs, shape[-bias_axes:], axes[-bias_axes:], Constant(0.0))
        self.biased = bias_axes > 0
        self.equation = equation
        self.dtype = dtype

    def __call__(self, x: jax.Array, output_dtype: str | None = None) -> jax.Array:
        dtype = output_dtype or self.dtype
        leading = x.ndim - self.equation.index(",") + 1
        # One axis of rows, since XLA on CPU is several times slower at gradients that contract both B and L.
        x_RxI = x.reshape(-1, *x.shape[leading:])
        kernel = self.kernel[...].astype(self.dtype)
        y_RxO = jnp.einsum(self.equation, x_RxI, kernel, preferred_element_type=dtype)
        if self.biased:
            y_RxO = y_RxO + self.bias[...].astype(dtype)
        return y_RxO.reshape(*x.shape[:leading], *y_RxO.shape[1:])


class RMSNorm(nnx.Module):
    """Divides the last axis by its root mean square, in float32, and scales it (arXiv 1910.07467)."""

    def __init__(self, rngs: nnx.Rngs, dim: int, axis: str, epsilon: float) -> None:
        self.scale = parameter(rngs, (dim,), (axis,), Constant(1.0))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean_square + self.epsilon) * self.scale[...]).astype(x.dtype)


def rotary_angles(positions_BxL: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Sine and cosine (B, L, 1, H/2) float32 of each position at each wavelength (arXiv 2104.09864)."""
    frequency = theta ** (-jnp.arange(head_dim // 2, dtype=jnp.float32) * 2 / head_dim)
    angle = positions_BxL[:, :, None, None].astype(jnp.float32) * frequency
    return jnp.sin(angle), jnp.cos(angle)


def rotate(x_BxLxNxH: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns the pair (i, i + H/2) of each head by its angle."""
    sine, cosine = angles
    first, second = jnp.split(x_BxLxNxH, 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x_BxLxNxH.dtype)


class Attention(nnx.Module):
    """Grouped-query attention (arXiv 2305.13245), queries and keys normed by head, with rotary positions."""

    def __init__(self, config: DenseConfig, rngs: nnx.Rngs) -> None:
        c = config
        stddev = c.model_dim**-0.5
        out_stddev = (c.num_heads * c.head_dim) ** -0.5 / math.sqrt(2 * c.num_layers)
        query_shape, key_shape = (
            (c.model_dim, c.num_heads, c.head_dim),
            (c.model_dim, c.num_kv_heads, c.head_dim),
        )
        query_axes, key_axes = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
        self.query = Projection(rngs, "rd,dnh->rnh", query_shape, query_axes, stddev, c.compute_dtype)
        self.key = Projection(rngs, "rd,dkh->rkh", key_shape, key_axes, stddev, c.compute_dtype)
        self.value = Projection(rngs, "rd,dkh->rkh", key_shape, key_axes, stddev, c.compute_dtype)
        out_shape, out_axes = (c.num_heads, c.head_dim, c.model_dim), ("heads", "head_dim", "embed")
        self.out = Projection(rngs, "rnh,nhd->rd", out_shape, out_axes, out_stddev, c.compute_dtype)
        self.query_norm = RMSNorm(rngs, c.head_dim, "head_dim", c.norm_epsilon)
        self.key_norm = RMSNorm(rngs, c.head_dim, "head_dim", c.norm_epsilon)

    def __call__(self, x_BxLxD: jax.Array, angles: tuple[jax.Array, jax.Array], attend: Attend) -> jax.Array:
        query_BxLxNxH = self.query_norm(self.query(x_BxLxD))
        key_BxLxKxH = self.key_norm(self.key(x_BxLxD))
        query_BxLxNxH, key_BxLxKxH = rotate(query_BxLxNxH, angles), rotate(key_BxLxKxH, angles)
        return self.out(attend(query_BxLxNxH, key_BxLxKxH, self.value(x_BxLxD)))


class GatedMLP(nnx.Module):
    """down(act(gate(x)) * up(x)): SwiGLU or GEGLU (arXiv 2002.05202)."""

    def __init__(self, config: DenseConfig, rngs: nnx.Rngs) -> None:
        c = config
        stddev, down_stddev = c.model_dim**-0.5, c.mlp_dim**-0.5 / math.sqrt(2 * c.num_layers)
        up_shape, up_axes = (c.model_dim, c.mlp_dim), ("embed", "mlp")
        self.gate = Projection(rngs, "rd,df->rf", up_shape, up_axes, stddev, c.compute_dtype)
        self.up = Projection(rngs, "rd,df->rf", up_shape, up_axes, stddev, c.compute_dtype)
        self.down = Projection(
            rngs, "rf,fd->rd", (c.mlp_dim, c.model_dim), ("mlp", "embed"), down_stddev, c.compute_dtype
        )
        self.activation = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu}[c.activation]

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        return self.down(self.activation(self.gate(x_BxLxD)) * self.up(x_BxLxD))


class Layer(nnx.Module):
    """Attention, then the MLP, each added to the residual stream after a norm of its input."""

    def __init__(
        self, config: DenseConfig, rngs: nnx.Rngs, mlp: Callable[[Any, nnx.Rngs], Any] = GatedMLP
    ) -> None:
        self.attention_norm = RMSNorm(rngs, config.model_dim, "embed", config.norm_epsilon)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(rngs, config.model_dim, "embed", config.norm_epsilon)
        self.mlp = mlp(config, rngs)

    def __call__(self, x_BxLxD: jax.Array, angles: tuple[jax.Array, jax.Array], attend: Attend) -> jax.Array:
        x_BxLxD = x_BxLxD + self.attention(self.attention_norm(x_BxLxD), angles, attend)
        return x_BxLxD + self.mlp(self.mlp_norm(x_BxLxD))


def embedding_gain(config: DenseConfig) -> float:
    """Factor on input embeddings."""
    return math.sqrt(config.model_dim) if config.scale_embeddings else 1.0


class Embedding(nnx.Module):
    """A row for each token, by default multiplied by sqrt(D) on the way in: a tied head has unit gain."""

    def __init__(self, config: DenseConfig, rngs: nnx.Rngs) -> None:
        shape = (config.vocab_size, config.model_dim)
        self.embedding = parameter(rngs, shape, ("vocab", "embed"), Normal(config.model_dim**-0.5))
        self.dtype, self.gain = config.compute_dtype, embedding_gain(config)

    def __call__(self, tokens_BxL: jax.Array) -> jax.Array:
        return (self.embedding[...][tokens_BxL] * self.gain).astype(self.dtype)


class Head(nnx.Module):
    """A column for each word: its logit is the product with the output of the last layer."""

    def __init__(self, config: DenseConfig, rngs: nnx.Rngs) -> None:
        shape = (config.model_dim, config.vocab_size)
        self.kernel = parameter(rngs, shape, ("embed", "vocab"), Normal(config.model_dim**-0.5))


class Decoder(nnx.Module):
    """The whole model: token ids in, float32 logits of the next token out."""

    def __init__(self, config: DenseConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = Embedding(config, rngs)
        self.layers = nnx.Dict(self.new_layers(rngs))
        self.final_norm = RMSNorm(rngs, config.model_dim, "embed", config.norm_epsilon)
        if not config.tie_embeddings:
            self.head = Head(config, rngs)

    def __call__(
        self,
        inputs_BxL: jax.Array,
        positions_BxL: jax.Array,
        segments_BxL: jax.Array,
        constrain: Constrain = unconstrained,
    ) -> Output:
        """Logits (B, L, V) float32; `constrain` pins activations to the layout of their logical axes."""
        x_BxLxD, _ = self.through_layers(inputs_BxL, positions_BxL, segments_BxL, constrain)
        return Output(self.logits(x_BxLxD, constrain))

    def through_layers(
        self, inputs_BxL: jax.Array, positions_BxL: jax.Array, segments_BxL: jax.Array, constrain: Constrain
    ) -> tuple[jax.Array, list[Any]]:
        """The output of the last layer, and the layers' `aux`; tokens of segment 0 are padding."""
        config = self.config

        def caller(constrain: Constrain, positions_BxL: jax.Array, segments_BxL: jax.Array) -> stack.Call:
            angles = rotary_angles(positions_BxL, config.head_dim, config.rope_theta)
            attend = causal(config.attention, segments_BxL, constrain)
            return self.call(angles, attend, constrain, segments_BxL > 0)

        rows = positions_BxL, segments_BxL
        x_BxLxD = self.looked_up(inputs_BxL, constrain)
        return stack.run(self.layers, caller, x_BxLxD, rows, constrain, config)

    def looked_up(self, tokens_BxL: jax.Array, constrain: Constrain) -> jax.Array:
        """The tokens' rows of the table, as the first layer reads them."""
        # Sharded like the table, and by copies of the model: otherwise each device would have all rows.
        x_BxLxD = constrain(self.embed(tokens_BxL), ("copy", None, "embed"))
        return constrain(x_BxLxD, ("batch", "length", None))

    def new_layers(self, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        """The layers, as `stack.layers` makes them."""
        c = self.config
        return stack.layers(lambda number: Layer(c, rngs), 0, c.num_layers, c)

    def call(
        self,
        angles: tuple[jax.Array, jax.Array],
        attend: Attend,
        constrain: Constrain,
        counted_BxL: jax.Array | None = None,
    ) -> stack.Call:
        """What calls a layer on some rows; `counted_BxL`: False for padding, None: all tokens count."""
        del counted_BxL

        def call(layer: Layer, x_BxLxD: jax.Array) -> tuple[jax.Array, None]:
            return constrain(layer(x_BxLxD, angles, attend), ("batch", "length", None)), None

        return call

    def new_cache(self, rows: int, length: int) -> Cache:
        """Room for the keys and values of so many rows and places, in each layer."""
        c = self.config
        shape = rows, length, c.num_kv_heads, c.head_dim
        empty = (
            jnp.zeros((stack.depth(name), *shape), c.compute_dtype) for name in stack.in_order(self.layers)
        )
        return [(zeros, zeros) for zeros in empty]

    def extend(
        self, x_BxQxD: jax.Array, first: jax.Array | int, cache: Cache, mask: jax.Array, constrain: Constrain
    ) -> tuple[jax.Array, Cache]:
        """The output of the last layer for Q more places, and the cache with their keys and values.

        Args:
          first: the place of the first of them.
          mask: True (1, 1, Q, S) where a query (third axis) may see a place of the cache.
        """
        config, (rows, count, _) = self.config, x_BxQxD.shape
        positions_BxQ = jnp.broadcast_to(first + jnp.arange(count), (rows, count))
        angles = rotary_angles(positions_BxQ, config.head_dim, config.rope_theta)

        def call(layer: Layer, x_BxQxD: jax.Array, held: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
            kept: list[jax.Array] = []

            def attend(query: jax.Array, *new: jax.Array) -> jax.Array:
                keys, values = (
                    jax.lax.dynamic_update_slice_in_dim(old, now, first, axis=1)
                    for old, now in zip(held, new, strict=True)
                )
                kept.extend((keys, values))
                return jax.nn.dot_product_attention(query, keys, values, mask=mask, implementation="xla")

            x_BxQxD, _ = self.call(angles, attend, constrain)(layer, x_BxQxD)
            return x_BxQxD, tuple(kept)

        return stack.one_by_one(self.layers, call, x_BxQxD, each=cache)

    def logits(self, x_BxLxD: jax.Array, constrain: Constrain) -> jax.Array | LazyLogits:
        """The logits (B, L, V), from the output of the last layer."""
        config, x_BxLxD = self.config, self.final_norm(x_BxLxD)
        table_VxD = self.embed.embedding[...] if config.tie_embeddings else self.head.kernel[...].T
        head = functools.partial(_logits, config=config, constrain=constrain)
        rows, length, _ = x_BxLxD.shape
        tokens = constrain.local("batch", rows) * constrain.local("length", length)
        at_a_time = min(tokens, config.logits_chunk or tokens)
        parts = 1 << (math.ceil(tokens / at_a_time) - 1).bit_length()  # mostly divides the vocabulary
        shards = config.vocab_size // constrain.local("vocab", config.vocab_size)
        found = LazyLogits(x_BxLxD, table_VxD.astype(config.compute_dtype), head, parts, shards)
        return found if parts > 1 else whole_logits(found)


def _logits(x_BxLxD: jax.Array, table_WxD: jax.Array, config: DenseConfig, constrain: Constrain) -> jax.Array:
    """Logits (B, L, W) float32 of the words that these are the rows of."""
    # Also its gradient, which is whole on every device otherwise.
    table_WxD = constrain(table_WxD, ("vocab", "embed"))
    # One axis of rows, as in `Projection`.
    x_RxD = x_BxLxD.astype(table_WxD.dtype).reshape(-1, x_BxLxD.shape[-1])
    logits_RxW = jnp.einsum("rd,wd->rw", x_RxD, table_WxD, preferred_element_type=jnp.float32)
    return constrain(logits_RxW.reshape(*x_BxLxD.shape[:-1], -1), ("batch", "length", "vocab"))


def flops_per_token(config: DenseConfig, seq_len: int) -> float:
    """Floating-point operations of one training step for each token, in rows of `seq_len` tokens.

    Six for each weight in a matmul, and 12 * layers * heads * head_dim * seq_len for attention, not halved
    for the causal mask (PaLM, arXiv 2204.02311, appendix B). Recomputation by `remat` is not counted.
    """
    c = config
    attention = c.model_dim * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)
    layer = attention + 3 * c.model_dim * c.mlp_dim
    weights = c.num_layers * layer + c.model_dim * c.vocab_size
    return 6.0 * weights + 12.0 * c.num_layers * c.num_heads * c.head_dim * seq_len


MODEL = Model(DenseConfig, Decoder, flops_per_token)
