"""Attention of packed rows, by the implementation that suits the devices.

Suffixes give the shapes of arrays: B rows, L positions, N query heads, K key and value heads, H head_dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh

from ddiloco.models.parameter import Constrain

IMPLEMENTATIONS = ("auto", "xla", "cudnn", "splash")
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

_QUERIES, _KEYS = ("batch", None, "query_heads", None), ("batch", None, "key_heads", None)
LANES = 128  # positions in the smallest block of a splash kernel
_BLOCK = 512  # and in the largest; larger ones do not fit with heads of 256


def causal(implementation: str, segments_BxL: jax.Array, constrain: Constrain) -> Attend:
    """Attention in which a query sees the keys that are not later and in the same document.

    Returns:
      `(query (B, L, N, H), key (B, L, K, H), value (B, L, K, H)) -> (B, L, N, H)`; N is a multiple of K.
    """
    mask_Bx1xLxL = causal_mask(segments_BxL)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        chosen: Any = suited(implementation, constrain.mesh, query)
        if chosen != "xla":
            key, value = spread(query, key, value, constrain)
        if chosen == "splash":
            return _splash(query, key, value, segments_BxL, constrain)
        return jax.nn.dot_product_attention(query, key, value, mask=mask_Bx1xLxL, implementation=chosen)

    def gathered(x: jax.Array, heads: str) -> jax.Array:
        # Constrained before and after: otherwise XLA would gather the inputs of x.
        return constrain(
            constrain(x, ("batch", "length", heads, None)), _QUERIES if heads == "heads" else _KEYS
        )

    def attend_across(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        # All-to-alls (arXiv 2309.14509): each device gets all positions of some heads, and gives them back.
        query, key, value = gathered(query, "heads"), gathered(key, "kv_heads"), gathered(value, "kv_heads")
        seen = constrain(attend(query, key, value), _QUERIES)
        return constrain(seen, ("batch", "length", "heads", None))

    return attend if constrain.mesh is None or constrain.mesh.shape["context"] == 1 else attend_across


def masked(implementation: str, mask: jax.Array, constrain: Constrain) -> Attend:
    """Attention in which a query sees the keys that `mask`, of a shape like (B, N, L, L), is True for."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        chosen: Any = suited(implementation, constrain.mesh, query)
        chosen = "xla" if chosen == "splash" else chosen
        if chosen == "cudnn":
            key, value = spread(query, key, value, constrain)
        return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation=chosen)

    return attend


def causal_mask(segments_BxL: jax.Array) -> jax.Array:
    """True (B, 1, L, L) where a query (third axis) may see a key: not later, and in the same document."""
    length = segments_BxL.shape[1]
    causal_LxL = jnp.tri(length, dtype=bool)
    return (causal_LxL & (segments_BxL[:, :, None] == segments_BxL[:, None, :]))[:, None]


def suited(implementation: str, mesh: Mesh | None, query_BxLxNxH: jax.Array) -> str:
    """The implementation of the settings, or with `auto` the best for these shapes on the mesh's devices.

    `mesh` None: JAX's default devices. Those count on which the program will run, not those that compile it.
    """
    if implementation != "auto":
        return implementation
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    _, length, _, head_dim = query_BxLxNxH.shape
    if platform == "tpu" and length % LANES == 0:
        return "splash"
    fits = length % 2 == 0 and head_dim % 8 == 0 and head_dim <= 128
    if platform == "gpu" and query_BxLxNxH.dtype == jnp.bfloat16 and fits:
        return "cudnn"
    return "xla"


def spread(
    query_BxLxNxH: jax.Array, key_BxLxKxH: jax.Array, value_BxLxKxH: jax.Array, constrain: Constrain
) -> tuple[jax.Array, jax.Array]:
    """Keys and values laid out so that each device has those of its own query heads, as kernels require.

    Where key heads are fewer than the shards of query heads, they are repeated for each query head.
    """
    if constrain.spec(_KEYS, key_BxLxKxH.shape) == constrain.spec(_QUERIES, query_BxLxNxH.shape):
        return key_BxLxKxH, value_BxLxKxH
    again = query_BxLxNxH.shape[2] // key_BxLxKxH.shape[2]
    key, value = (constrain(jnp.repeat(x, again, axis=2), _QUERIES) for x in (key_BxLxKxH, value_BxLxKxH))
    return key, value


def _splash(
    query_BxLxNxH: jax.Array,
    key_BxLxKxH: jax.Array,
    value_BxLxKxH: jax.Array,
    segments_BxL: jax.Array,
    constrain: Constrain,
) -> jax.Array:
    """The TPU's flash attention, each device with its own rows and heads; elsewhere interpreted, slowly."""
    mesh = constrain.mesh
    interpret = (jax.default_backend() if mesh is None else mesh.devices.flat[0].platform) != "tpu"
    attend = functools.partial(_splash_on_device, interpret=interpret)
    if mesh is None:
        return attend(query_BxLxNxH, key_BxLxKxH, value_BxLxKxH, segments_BxL)
    query = constrain.spec(_QUERIES, query_BxLxNxH.shape)
    segments = constrain.spec(("batch", None), segments_BxL.shape)
    shards = jax.shard_map(
        attend, mesh=mesh, in_specs=(query, query, query, segments), out_specs=query, check_vma=False
    )
    return shards(query_BxLxNxH, key_BxLxKxH, value_BxLxKxH, segments_BxL)


def _splash_on_device(
    query_BxLxNxH: jax.Array,
    key_BxLxKxH: jax.Array,
    value_BxLxKxH: jax.Array,
    segments_BxL: jax.Array,
    interpret: bool,
) -> jax.Array:
    _, length, heads, head_dim = query_BxLxNxH.shape
    block = math.gcd(length, _BLOCK)
    sizes: Any = dict.fromkeys(
        ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), block
    )
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([splash.CausalMask((length, length))] * heads),
        block_sizes=splash.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    scaled = query_BxLxNxH * head_dim**-0.5  # which the kernel leaves to the caller
    heads_first = (jnp.swapaxes(x, 1, 2) for x in (scaled, key_BxLxKxH, value_BxLxKxH))
    seen_BxNxLxH = jax.vmap(kernel)(*heads_first, splash.SegmentIds(segments_BxL, segments_BxL))
    return jnp.swapaxes(seen_BxNxLxH, 1, 2).astype(query_BxLxNxH.dtype)
