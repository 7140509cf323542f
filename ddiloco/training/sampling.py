"""Sampling, one token at a time: the continuation of a prompt, and captions of images."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddiloco.training.parameters import forward


def sample(
    config: Any,
    params: Mapping[str, jax.Array],
    prompt_tokens: Sequence[int] | np.ndarray,
    num_tokens: int,
    temperature: float,
    seed: int,
    window: int = 128,
) -> np.ndarray:
    """The `num_tokens` tokens (int32) that follow the prompt, each drawn given the last `window` tokens.

    Temperature 0 takes the likeliest token each time. The model runs over the whole window for each token:
    this is for looking at what a model has learnt, not for serving. Compiled once for each (config, window,
    num_tokens).

    Raises:
      ValueError: the prompt is empty, or the temperature is negative.
    """
    prompt = np.asarray(prompt_tokens, np.int32)[-window:]
    if prompt.size == 0:
        raise ValueError("the prompt is empty, but must have at least one token")
    if temperature < 0:
        raise ValueError(f"the temperature is {temperature}, but must be at least 0")
    tokens_W = np.zeros(window, np.int32)
    tokens_W[window - prompt.size :] = prompt
    return np.asarray(
        _continue(config, num_tokens, params, tokens_W, prompt.size, temperature, jax.random.key(seed))
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _continue(
    config: Any,
    num_tokens: int,
    params: Mapping[str, jax.Array],
    tokens_W: jax.Array,
    length: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
) -> jax.Array:
    """Aligns tokens with the right end of the window, so that the next one always follows the last place."""
    window = tokens_W.shape[0]

    def extend(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[Any, jax.Array]:
        tokens_W, length = carry
        positions_W = jnp.arange(window) - (window - length)
        segments_W = (positions_W >= 0).astype(jnp.int32)
        logits = forward(config, params, tokens_W[None], jnp.maximum(positions_W, 0)[None], segments_W[None])
        logits_V = logits[0, -1]
        drawn = jax.random.categorical(key, logits_V / jnp.maximum(temperature, 1e-6))
        token = jnp.where(temperature > 0, drawn, jnp.argmax(logits_V)).astype(jnp.int32)
        return (jnp.roll(tokens_W, -1).at[-1].set(token), jnp.minimum(length + 1, window)), token

    _, drawn = jax.lax.scan(extend, (tokens_W, length), jax.random.split(key, num_tokens))
    return drawn


def write_captions(
    config: Any,
    params: Mapping[str, jax.Array],
    image_BxHxWxC: np.ndarray,
    length: int,
    bos: int,
    eos: int,
) -> np.ndarray:
    """Captions (B, length) int32 by greedy decoding after `bos`; after the first `eos` all are `eos`.

    The model runs over the whole row for each token, as in `sample`. Compiled once for each (config, length,
    shape).
    """
    return np.asarray(_write(config, length, params, image_BxHxWxC, bos, eos))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _write(
    config: Any,
    length: int,
    params: Mapping[str, jax.Array],
    image_BxHxWxC: jax.Array,
    bos: jax.Array,
    eos: jax.Array,
) -> jax.Array:
    def extend(tokens_BxL: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_BxLxV = forward(config, params, image_BxHxWxC, tokens_BxL)
        likeliest_B = jnp.argmax(logits_BxLxV[:, place], axis=-1)
        token_B = jnp.where(tokens_BxL[:, place] == eos, eos, likeliest_B).astype(jnp.int32)
        # The last token has no place among the inputs, and is dropped here.
        return tokens_BxL.at[:, place + 1].set(token_B, mode="drop"), token_B

    begun_BxL = jnp.full((len(image_BxHxWxC), length), eos, jnp.int32).at[:, 0].set(bos)
    _, written_LxB = jax.lax.scan(extend, begun_BxL, jnp.arange(length))
    return written_LxB.T
