"""Rows of stacks that lie over devices by rows: the numbers, and where they are."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddiloco.arrays.sharded_rows import row_of, row_sharding

ROWS = 4


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("stage", "fsdp", "tensor"))


@pytest.mark.parametrize(
    ("shape", "spec", "expected"),
    [
        ((6, 8), ("stage",), (("stage",), None)),
        ((8, 3), ("stage", "fsdp"), (("fsdp", "stage"), None)),
        ((6, 8), ("stage", "fsdp", "tensor"), (("fsdp",), ("tensor", "stage"))),
        ((2, 5), ("stage", ("fsdp",)), ("fsdp",)),
        ((3,), ("stage",), ()),
        ((6, 8), (None, "fsdp"), ("fsdp",)),
        ((6, 8), (), ()),
        ((8, 8), (("stage", "fsdp"),), (("stage", "fsdp"), None)),
    ],
)
def test_a_row_is_what_it_was_and_lies_in_as_many_parts_as_its_stack_where_it_can(
    shape, spec, expected, mesh
):
    rng = np.random.default_rng(0)
    values = rng.standard_normal((ROWS, *shape), np.float32)
    values[:, 0] = -0.0
    values[1, 1] = np.nan
    laid = NamedSharding(mesh, PartitionSpec(*spec))
    stack = jax.device_put(values, laid)
    wanted = NamedSharding(mesh, PartitionSpec(*expected))
    assert row_sharding(laid, shape).is_equivalent_to(wanted, len(shape))
    for row in range(ROWS):
        found = jax.jit(row_of, static_argnums=(1, 2))(stack, row, laid)
        np.testing.assert_array_equal(np.asarray(found).view(np.uint32), values[row].view(np.uint32))
        if laid.spec and laid.spec[0]:
            assert found.sharding.is_equivalent_to(wanted, len(shape))
