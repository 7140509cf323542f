"""Sampling against one greedy forward at a time, and what its seed and temperature do."""

import dataclasses

import jax
import numpy as np
import pytest

from ddiloco.models.moe import MoEConfig
from ddiloco.outer.stacks import array_of
from ddiloco.training.mesh import MeshConfig, carve
from ddiloco.training.parameters import forward, sampled_parameters
from ddiloco.training.sampling import sample
from ddiloco.training.sharding import parameter_shardings
from tests.training.batches import TINY

ONE_LAYER = dataclasses.replace(TINY, num_layers=1)
PROMPT = np.array([3, 14, 15, 9], np.int32)


@pytest.fixture(scope="module")
def params():
    return dict(sampled_parameters(ONE_LAYER, 2))


def greedily(config, params, prompt, count, window):
    """The tokens that a forward over all that is to be seen finds likeliest, and by how much at least."""
    step = jax.jit(forward, static_argnums=0)
    tokens, begin, least = list(prompt), 0, np.inf
    for _ in range(count):
        if len(tokens) - begin > window:
            begin = len(tokens) - window // 2
        row, seen = np.zeros((1, window), np.int32), tokens[begin:]
        row[0, : len(seen)] = seen
        logits = step(config, params, row, np.arange(window, dtype=np.int32)[None], np.ones_like(row))
        second, first = np.sort(np.asarray(logits[0, len(seen) - 1]))[-2:]
        least = min(least, first - second)
        tokens.append(int(np.argmax(logits[0, len(seen) - 1])))
    return tokens[len(prompt) :], least


EXPERTS = MoEConfig(**{**dataclasses.asdict(TINY), "num_layers": 3}, num_experts=4, expert_dim=16)
KINDS = {
    "one layer": ONE_LAYER,
    "layers": TINY,
    "stacked": dataclasses.replace(TINY, num_layers=3, scan_layers=True),
    "tied": dataclasses.replace(ONE_LAYER, tie_embeddings=True, logits_chunk=4),
    "experts": dataclasses.replace(EXPERTS, capacity_factor=None),
    "stacked experts": dataclasses.replace(EXPERTS, capacity_factor=None, dense_layers=1, scan_layers=True),
}
OFTEN = ("tied",)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in OFTEN)) for kind in KINDS]
)
def test_temperature_zero_takes_the_likeliest_token_as_without_a_cache(kind):
    config = KINDS[kind]
    params = dict(sampled_parameters(config, 2))
    expected, least = greedily(config, params, PROMPT, 13, 8)
    assert least > 1e-4  # no tie, that rounding could decide
    drawn = sample(config, params, PROMPT, 13, temperature=0.0, seed=0, window=8)
    assert drawn.dtype == np.int32
    np.testing.assert_array_equal(drawn, expected)


def test_experts_with_a_capacity_sample_as_without():
    capped = dataclasses.replace(EXPERTS, num_layers=1)
    params = dict(sampled_parameters(capped, 2))
    free = dataclasses.replace(capped, capacity_factor=None)
    drawn = [sample(config, params, PROMPT, 13, 0.0, 0, window=8) for config in (capped, free)]
    np.testing.assert_array_equal(*drawn)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(MeshConfig(data=1, fsdp=-1), marks=pytest.mark.slow),
        pytest.param(MeshConfig(data=2, tensor=4), marks=pytest.mark.slow),
        MeshConfig(data=1, stage=2, tensor=4),
    ],
)
def test_sharded_parameters_give_the_same_tokens(mesh):
    config = dataclasses.replace(KINDS["stacked"], num_layers=4)
    params = dict(sampled_parameters(config, 2))
    shardings = parameter_shardings(config, carve(jax.devices(), 1, mesh)[0])
    placed = {name: jax.device_put(array_of(name, params), at) for name, at in shardings.items()}
    assert any(not at.is_fully_replicated for at in shardings.values())
    drawn = [sample(config, held, PROMPT, 13, 0.0, 0, window=8) for held in (params, placed)]
    np.testing.assert_array_equal(*drawn)


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


def test_an_empty_prompt_is_refused(params):
    with pytest.raises(ValueError, match="the prompt is empty"):
        sample(ONE_LAYER, params, [], 1, 1.0, 0)
