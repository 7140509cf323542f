"""Tensors encoded where their shards lie: the bytes of one device, and no device ever holds them all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddiloco.outer.codecs import CODECS
from ddiloco.outer.encoding import encode_sharded
from experiments.studies.compiling.cost import cost_of
from experiments.studies.compiling.hlo import parse

LAID = [
    ((64, 256), ("fsdp", "tensor")),
    ((64, 256), (None, ("fsdp", "tensor"))),  # cuts groups of 128
    ((2, 8, 6, 64), (None, "fsdp", None, "tensor")),  # groups of two rows
    ((16, 24), ("fsdp", None)),  # groups that lie across rows
    ((256,), ("fsdp",)),  # fewer groups than shards
]
# How a tensor is cut depends on the codec's group alone: one codec of groups everywhere, the others once.
CASES = [("int4", laid) for laid in LAID]
CASES += [(name, LAID[1]) for name in ("bf16", "sign")]


def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("fsdp", "tensor"))


def encoded(name, shape, spec):
    sharding = NamedSharding(mesh(), PartitionSpec(*spec))
    lowered = jax.jit(lambda x: encode_sharded(CODECS[name], x, sharding)).lower(
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    )
    return lowered.compile(), sharding


@pytest.mark.parametrize(("name", "laid"), CASES)
def test_sharded_tensors_have_the_bytes_of_one_device_and_no_device_holds_them_all(name, laid):
    shape, _ = laid
    value = np.random.default_rng(0).standard_normal(shape, np.float32)
    value.flat[7] = np.nan
    compiled, sharding = encoded(name, *laid)
    found = compiled(jax.device_put(value, sharding))
    expected = jax.jit(CODECS[name].encode)(value)
    for ours, theirs in zip(found.arrays, expected, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours).reshape(-1), theirs)
    np.testing.assert_array_equal(found.decoded, CODECS[name].decode(expected, shape))
    if laid in LAID[3:]:
        return
    cost = cost_of(parse(compiled.as_text()), 8).bytes_by_kind()
    assert cost["all-gather"] == cost["all-reduce"] == 0
    for array, found in zip(
        compiled.out_info.arrays, jax.tree.leaves(compiled.output_shardings.arrays), strict=True
    ):
        assert np.prod(found.shard_shape(array.shape)) == np.prod(array.shape) / (
            8 if "tensor" in str(sharding.spec) else 4
        )
