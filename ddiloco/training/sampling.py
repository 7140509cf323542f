"""Sampling with a cache of keys and values: the continuation of a prompt, and captions of images.

Parameters may be sharded over a mesh; nothing gathers them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ddiloco.models import model_of
from ddiloco.models.model import whole_logits
from ddiloco.models.parameter import Constrain, unconstrained
from ddiloco.training.parameters import forward, module_of
from ddiloco.training.sharding import OnMesh


def sample(
    config: Any,
    params: Mapping[str, jax.Array],
    prompt_tokens: Sequence[int] | np.ndarray,
    num_tokens: int,
    temperature: float,
    seed: int,
    window: int = 128,
) -> np.ndarray:
    """The `num_tokens` tokens (int32) that follow the prompt, each sampled given at most `window` before it.

    Where these are known, the next are sampled given the last half of them, and so on. Temperature 0 takes
    the likeliest token each time. Compiled once for each (config, window, num_tokens). A model that has no
    `new_cache` and `extend`, as `ddiloco.models.dense` has them, runs over the whole window for each token.

    Raises:
      ValueError: the prompt is empty.
    """
    known = np.asarray(prompt_tokens, np.int32)[-window:]
    if known.size == 0:
        raise ValueError("the prompt is empty, but must have at least one token")
    fill = functools.partial(_fill, model_of(config).sampling(config), _constrain(params), params)
    keys = jax.random.split(jax.random.key(seed), num_tokens)
    sampled = np.zeros(0, np.int32)
    while sampled.size < num_tokens:
        stop = min(window + 1, known.size + num_tokens - sampled.size)
        row = np.zeros(window + 1, np.int32)
        row[: known.size] = known
        filled = np.asarray(fill(row, known.size, stop, _Draws(temperature, keys, sampled.size)))
        sampled = np.concatenate([sampled, filled[known.size : stop]])
        known = filled[:stop][-max(1, window // 2) :]
    return sampled


class _Draws(NamedTuple):
    """State of sampling: a key for each wanted token, and the number of keys that were used."""

    temperature: jax.Array | float
    keys_N: jax.Array
    so_far: jax.Array | int


@functools.partial(jax.jit, static_argnums=(0, 1))
def _fill(
    config: Any,
    constrain: Constrain,
    params: Mapping[str, jax.Array],
    tokens_T: jax.Array,
    length: jax.Array,
    stop: jax.Array,
    draws: _Draws,
) -> jax.Array:
    """The row of window + 1 tokens, of which `length` are known, with those up to `stop` sampled."""
    decoder, places_S = module_of(config, params), jnp.arange(tokens_T.shape[0] - 1)
    cache = _read(decoder, constrain, tokens_T[None, :-1])

    def extend(place: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        tokens_T, cache = carry
        if cache is None:
            inputs = tokens_T[None, :-1], places_S[None], jnp.ones((1, *places_S.shape), jnp.int32)
            logits_V = forward(config, params, *inputs)[0, place]
        else:
            seen_S = places_S <= place
            x_1x1xD = decoder.embed(tokens_T[place][None, None])
            x_1x1xD, cache = decoder.extend(x_1x1xD, place, cache, seen_S[None, None, None], constrain)
            logits_V = _logits(decoder, x_1x1xD, constrain)[0]
        key = draws.keys_N[draws.so_far + place - (length - 1)]
        token = jax.random.categorical(key, logits_V / jnp.maximum(draws.temperature, 1e-6))
        token = jnp.where(draws.temperature > 0, token, jnp.argmax(logits_V)).astype(jnp.int32)
        return tokens_T.at[place + 1].set(token), cache

    return jax.lax.fori_loop(length - 1, stop - 1, extend, (tokens_T, cache))[0]


def _read(decoder: Any, constrain: Constrain, tokens_BxS: jax.Array) -> Any:
    """A cache with keys and values of these tokens; None for a model that has no cache.

    Positions of unknown tokens are read too: their cache entries are overwritten before they are used.
    """
    if not hasattr(decoder, "new_cache"):
        return None
    places_S = jnp.arange(tokens_BxS.shape[1])
    causal_SxS = places_S <= places_S[:, None]
    cache = decoder.new_cache(*tokens_BxS.shape)
    return decoder.extend(decoder.embed(tokens_BxS), 0, cache, causal_SxS[None, None], constrain)[1]


def write_captions(
    config: Any,
    params: Mapping[str, jax.Array],
    image_BxHxWxC: np.ndarray,
    length: int,
    bos: int,
    eos: int,
) -> np.ndarray:
    """Captions (B, length) int32 by greedy decoding after `bos`; after the first `eos` all are `eos`.

    Compiled once for each (config, length, shape).
    """
    return np.asarray(_write(config, _constrain(params), length, params, image_BxHxWxC, bos, eos))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _write(
    config: Any,
    constrain: Constrain,
    length: int,
    params: Mapping[str, jax.Array],
    image_BxHxWxC: jax.Array,
    bos: jax.Array,
    eos: jax.Array,
) -> jax.Array:
    decoder, rows, patches = module_of(config, params), len(image_BxHxWxC), config.num_patches
    places_S = jnp.arange(patches + length)
    of_patch_PxS = jnp.broadcast_to(places_S < patches, (patches, patches + length))
    cache = decoder.new_cache(rows, patches + length)
    x_BxPxD = decoder.embed_image(image_BxHxWxC)
    _, cache = decoder.extend(x_BxPxD, 0, cache, of_patch_PxS[None, None], constrain)

    def extend(carry: tuple[jax.Array, Any], place: jax.Array) -> tuple[Any, jax.Array]:
        last_B, cache = carry
        seen_S = places_S <= patches + place
        x_Bx1xD = decoder.embed(last_B[:, None])
        x_Bx1xD, cache = decoder.extend(x_Bx1xD, patches + place, cache, seen_S[None, None, None], constrain)
        likeliest_B = jnp.argmax(_logits(decoder, x_Bx1xD, constrain), axis=-1)
        token_B = jnp.where(last_B == eos, eos, likeliest_B).astype(jnp.int32)
        return (token_B, cache), token_B

    begun = jnp.full(rows, bos, jnp.int32), cache
    _, written_LxB = jax.lax.scan(extend, begun, jnp.arange(length))
    return written_LxB.T


def _logits(decoder: Any, x_Bx1xD: jax.Array, constrain: Constrain) -> jax.Array:
    """The logits (B, V) of the one place, from the output of the last layer."""
    return whole_logits(decoder.logits(x_Bx1xD, constrain))[:, 0]


def _constrain(params: Mapping[str, jax.Array]) -> Constrain:
    """Constrains activations on the mesh that the parameters lie on, if they do."""
    sharding = getattr(next(iter(params.values())), "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return OnMesh(mesh) if isinstance(mesh, Mesh) else unconstrained
