"""The loss from logits that exist a part of the vocabulary at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.models.model import LazyLogits, whole_logits
from ddiloco.training.loss import _by_target, _in_parts
from tests.long import times

ROWS, LENGTH, WIDTH = 2, 3, 4


def head(x, table):
    return jnp.einsum("bld,wd->blw", x, table)


def lazy(words, parts, shards, seed):
    """Also targets. Logits are whole numbers, so that some are equal; often the target's is the largest."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.integers(-2, 3, (ROWS, LENGTH, WIDTH)), jnp.float32)
    table = jnp.asarray(rng.integers(-2, 3, (words, WIDTH)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, words, (ROWS, LENGTH)), jnp.int32)
    logits = LazyLogits(x, table, head, parts, shards)
    likeliest = jnp.argmax(whole_logits(logits), axis=-1)
    return logits, targets.at[0].set(likeliest[0]).at[1, 0].set(likeliest[1, 0] + 1)


@settings(max_examples=times(9, 20))
@given(
    sizes=st.sampled_from([(7, 4, 1), (24, 2, 3)]),  # few, since each compiles
    seed=st.integers(0, 99),
)
def test_parts_of_the_vocabulary_give_what_all_of_it_gives(sizes, seed):
    logits, targets = lazy(*sizes, seed)
    for ours, expected in zip(
        _by_target(logits, targets, True), _by_target(whole_logits(logits), targets, True), strict=True
    ):
        np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("words", "parts", "shards"), [(7, 4, 1), (24, 2, 3)])
def test_their_gradient_is_that_of_all_of_it(words, parts, shards):
    logits, targets = lazy(words, parts, shards, 0)

    def loss(inputs, in_parts):
        found = logits._replace(x=inputs[0], table=inputs[1])
        normaliser, of_target, _ = _by_target(found if in_parts else whole_logits(found), targets, False)
        return jnp.sum(normaliser - of_target + 0.1 * normaliser**2)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    for ours, expected in zip(
        *(gradient((logits.x, logits.table), in_parts) for in_parts in (True, False)), strict=True
    ):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_each_device_has_its_share_of_every_part():
    logits, _ = lazy(24, 2, 3, 0)
    table, words = _in_parts(logits)
    of_device = words.reshape(2, 3, 4)  # parts, devices, words
    for device in range(3):
        assert set(of_device[:, device].ravel().tolist()) == set(range(8 * device, 8 * device + 8))
    np.testing.assert_array_equal(table, logits.table[words])
