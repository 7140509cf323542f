"""Sampling against one greedy forward at a time, and what its seed and temperature do."""

import dataclasses

import jax
import numpy as np
import pytest

from ddiloco.training.parameters import forward, init_parameters
from ddiloco.training.sampling import sample
from tests.training.batches import TINY

ONE_LAYER = dataclasses.replace(TINY, num_layers=1)
PROMPT = np.array([3, 14, 15, 9], np.int32)


@pytest.fixture(scope="module")
def params():
    return init_parameters(ONE_LAYER, 2)


def next_greedily(params, tokens):
    padded, positions = np.zeros((1, 8), np.int32), np.arange(8, dtype=np.int32)[None]
    padded[0, : len(tokens)] = tokens
    logits = jax.jit(forward, static_argnums=0)(ONE_LAYER, params, padded, positions, np.ones_like(padded))
    return int(np.argmax(logits[0, len(tokens) - 1]))


def test_temperature_zero_takes_the_likeliest_token_given_the_window(params):
    tokens = list(PROMPT)
    for _ in range(6):
        tokens.append(next_greedily(params, tokens[-8:]))
    drawn = sample(ONE_LAYER, params, PROMPT, 6, temperature=0.0, seed=0, window=8)
    assert drawn.dtype == np.int32
    np.testing.assert_array_equal(drawn, tokens[4:])


def test_a_seed_repeats_and_another_differs(params):
    first, again, other = (
        sample(ONE_LAYER, params, PROMPT, 24, temperature=1.5, seed=seed, window=8) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert first.min() >= 0
    assert first.max() < 32


def test_a_prompt_longer_than_the_window_counts_by_its_end(params):
    long = np.concatenate([np.arange(20), PROMPT])
    ends = np.concatenate([np.arange(20)[::-1], np.arange(16, 20), PROMPT])
    same = [sample(ONE_LAYER, params, prompt, 24, 1.0, seed=0, window=8) for prompt in (long, ends)]
    np.testing.assert_array_equal(*same)


def test_an_empty_prompt_and_a_negative_temperature_are_refused(params):
    with pytest.raises(ValueError, match="the prompt is empty"):
        sample(ONE_LAYER, params, [], 1, 1.0, 0)
    with pytest.raises(ValueError, match="the temperature is -1, but must be at least 0"):
        sample(ONE_LAYER, params, [1], 1, -1, 0)
