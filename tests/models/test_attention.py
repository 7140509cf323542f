"""Attention by implementation: the same numbers, on one device and on eight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddiloco.models.attention import causal, spread, suited
from ddiloco.models.parameter import unconstrained
from ddiloco.training.sharding import OnMesh
from tests.training.batches import mesh_of, packed_batch

ROWS, LENGTH, HEADS, DIM = 8, 128, 4, 32
MESHES = {
    "one device": None,
    "rows over eight": {"data": 2, "fsdp": 4},
    "heads over four": {"data": 2, "tensor": 4},  # of two key heads: each device gets those it needs
}


def inputs(kv_heads=2):
    rng = np.random.default_rng(0)
    shapes = [(ROWS, LENGTH, heads, DIM) for heads in (HEADS, kv_heads, kv_heads)]
    return [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes]


@pytest.fixture(scope="module")
def segments():
    return jnp.asarray(packed_batch(3, ROWS, LENGTH, 32)["segments"])


def seen_and_gradients(implementation, arrays, segments, constrain=unconstrained):
    cotangent = jnp.cos(jnp.arange(ROWS * LENGTH * HEADS * DIM, dtype=jnp.float32)).reshape(arrays[0].shape)

    @jax.jit
    def both(query, key, value):
        attend = causal(implementation, segments, constrain)
        seen, pull = jax.vjp(attend, query, key, value)
        return seen, *pull(cotangent)

    return both(*arrays)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(sizes, id=name, marks=[pytest.mark.slow] * (name != "heads over four"))
        for name, sizes in MESHES.items()
    ],
)
def test_splash_gives_what_the_plain_one_gives_and_its_gradients(sizes, segments):
    constrain = unconstrained if sizes is None else OnMesh(mesh_of(8, **sizes))
    found = seen_and_gradients("splash", inputs(), segments, constrain)
    for ours, expected in zip(found, seen_and_gradients("xla", inputs(), segments), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


def test_keys_of_too_few_heads_lie_over_the_devices_as_the_queries_do():
    """As cuDNN's kernel asks for; it refuses other layouts, and only where it runs."""
    constrain = OnMesh(mesh_of(8, **MESHES["heads over four"]))
    (query, *few), axes = inputs(), ("batch", None, "heads", None)
    for given, found in zip(few, spread(query, *few, constrain), strict=True):
        np.testing.assert_array_equal(found, jnp.repeat(given, 2, axis=2))
        assert found.sharding.spec == constrain(query, axes).sharding.spec
    enough = inputs(HEADS)
    assert all(a is b for a, b in zip(enough[1:], spread(*enough, constrain), strict=True))


@pytest.mark.parametrize("implementation", ["xla", pytest.param("splash", marks=pytest.mark.slow)])
def test_neither_later_tokens_nor_other_documents_are_seen(implementation, segments):
    query, key, value = inputs()
    constrain = OnMesh(mesh_of(1))
    plain, *_ = seen_and_gradients(implementation, (query, key, value), segments, constrain)
    last = LENGTH // 2
    hidden = (segments != segments[:, last : last + 1]) | (jnp.arange(LENGTH) > last)
    other = jnp.where(hidden[:, :, None, None], 7.0, value)
    again, *_ = seen_and_gradients(implementation, (query, key, other), segments, constrain)
    np.testing.assert_array_equal(plain[:, last], again[:, last])
    assert np.abs(plain - again).max() > 1


class Device:
    def __init__(self, platform):
        self.platform = platform


class Mesh:
    def __init__(self, platform):
        self.devices = np.asarray([Device(platform)])


@pytest.mark.parametrize(
    ("platform", "length", "dim", "dtype", "expected"),
    [
        ("cpu", 128, 64, jnp.float32, "xla"),
        ("tpu", 2048, 256, jnp.bfloat16, "splash"),
        ("tpu", 100, 256, jnp.bfloat16, "xla"),
        ("gpu", 2048, 64, jnp.bfloat16, "cudnn"),
        ("gpu", 2048, 64, jnp.float32, "xla"),
        ("gpu", 255, 64, jnp.bfloat16, "xla"),
    ],
)
def test_auto_goes_by_the_devices_that_will_run_it(platform, length, dim, dtype, expected):
    query = jax.ShapeDtypeStruct((2, length, 4, dim), dtype)
    assert suited("auto", Mesh(platform), query) == expected
    assert suited("xla", Mesh(platform), query) == "xla"
