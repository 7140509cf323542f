"""A device that errs: one flipped bit, in any array and on any device, is found and told where it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddiloco.training.step import checksums


def tree(sharding):
    values = {
        "w": jnp.arange(16.0).reshape(8, 2),
        "half": jnp.ones((8,), jnp.bfloat16),
        "count": jnp.int32(3),
        "nan": jnp.array([jnp.nan, -0.0]),
    }
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    return {k: jax.device_put(v, sharding if v.shape[:1] == (8,) else whole) for k, v in values.items()}


def flipped(array, device):
    """The array with the lowest bit of one element flipped on one device."""
    shards = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device == device:
            data.reshape(-1).view(np.uint8)[0] ^= 1
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def differing(one, other):
    """The devices whose checksums differ."""
    found = checksums(one), checksums(other)
    return [device for device in found[0] if found[0][device] != found[1][device]]


@pytest.fixture(scope="module")
def sharding():
    return NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), PartitionSpec("data"))


def test_equal_bits_do_not_differ_though_a_nan_is_among_them(sharding):
    assert differing(tree(sharding), tree(sharding)) == []


@pytest.mark.parametrize(("name", "device"), [("w", 0), ("half", 3), ("count", 3), ("nan", 0)])
def test_one_flipped_bit_is_found_on_its_device(name, device, sharding):
    good = tree(sharding)
    at = jax.devices()[device]
    bad = {**good, name: flipped(good[name], at)}
    assert differing(good, bad) == [at]


def test_a_zero_and_a_negative_zero_differ(sharding):
    zeros = jax.device_put(jnp.zeros((8,)), sharding)
    assert len(differing({"x": zeros}, {"x": -zeros})) == 4


def test_words_that_change_places_differ(sharding):
    """A plain sum would not see it; nor would one with a weight for each array alone."""
    values = jnp.arange(16.0).reshape(8, 2)
    one, other = ({"x": jax.device_put(x, sharding)} for x in (values, values[:, ::-1]))
    assert len(differing(one, other)) == 4
    assert len(differing({"x": one["x"], "y": other["x"]}, {"x": other["x"], "y": one["x"]})) == 4
