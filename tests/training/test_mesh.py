"""Devices carved into meshes, and parameters laid on them."""

import warnings

import jax
import pytest
from jax.sharding import PartitionSpec

from ddiloco.config import ConfigError, build
from ddiloco.training.mesh import MeshConfig, carve
from ddiloco.training.sharding import batch_sharding, parameter_shardings, partition
from tests.training.batches import TINY, mesh_of


def test_learners_get_contiguous_equal_groups():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        meshes = carve(jax.devices()[:8], 2, MeshConfig(fsdp=2))
    assert [dict(mesh.shape) for mesh in meshes] == [{"data": 2, "fsdp": 2, "tensor": 1, "expert": 1}] * 2
    assert [[device.id for device in mesh.devices.flat] for mesh in meshes] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_devices_left_over_stay_idle_with_a_warning():
    with pytest.warns(UserWarning, match="2 of 8 devices stay idle: 3 learners have 2 each"):
        meshes = carve(jax.devices()[:8], 3, MeshConfig())
    assert [mesh.size for mesh in meshes] == [2, 2, 2]


def test_more_learners_than_devices_share_them_in_turn():
    devices = jax.devices()[:2]
    meshes = carve(devices, 5, MeshConfig())
    assert [mesh.devices.item() for mesh in meshes] == [devices[m % 2] for m in range(5)]
    assert meshes[0] == meshes[2]


@pytest.mark.parametrize(
    ("num_learners", "config", "told"),
    [
        (1, MeshConfig(tensor=3), "data=-1 x fsdp=1 x tensor=3 x expert=1 needs a multiple of 3 devices"),
        (2, MeshConfig(data=2), "data=2 x fsdp=1 x tensor=1 x expert=1 needs 2 devices, but a learner has 4"),
        (1, MeshConfig(data=16), "needs 16 devices, but a learner has 8"),
        (9, MeshConfig(tensor=2), "needs a multiple of 2 devices, but a learner has 1"),
    ],
)
def test_a_mesh_that_does_not_fit_is_told_in_a_line(num_learners, config, told):
    with pytest.raises(ConfigError) as raised:
        carve(jax.devices()[:8], num_learners, config)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"fsdp": 0}, "mesh.fsdp: is 0, but must be at least 1, or -1 for what is left"),
        ({"data": -2}, "mesh.data: is -2, but must be at least 1, or -1 for what is left"),
        ({"fsdp": -1}, "mesh.fsdp: is -1, but data is too; only one size may be what is left"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(values, told):
    with pytest.raises(ConfigError) as raised:
        build(MeshConfig, values, "mesh")
    assert str(raised.value) == told


def test_matrices_lie_over_fsdp_and_tensor_and_rows_over_data_and_fsdp():
    mesh = mesh_of(8, data=2, fsdp=2, tensor=2)
    specs = {name: sharding.spec for name, sharding in parameter_shardings(TINY, mesh).items()}
    assert specs["embed/embedding"] == PartitionSpec(("tensor",), ("fsdp",))
    assert specs["layers/0/attention/query/kernel"] == PartitionSpec(("fsdp",), ("tensor",), None)
    assert specs["layers/0/mlp/down/kernel"] == PartitionSpec(("tensor",), ("fsdp",))
    assert batch_sharding(mesh).shard_shape((8, 5)) == (2, 5)


def test_an_axis_that_does_not_divide_is_not_sharded():
    mesh = mesh_of(4, data=1, tensor=4)
    assert partition(mesh, ("vocab", "embed"), (259, 16)).spec == PartitionSpec(None, None)
    query = parameter_shardings(TINY, mesh)["layers/0/attention/query/kernel"]
    key = parameter_shardings(TINY, mesh)["layers/0/attention/key/kernel"]
    assert query.shard_shape((16, 4, 4)) == (16, 1, 4)
    assert key.shard_shape((16, 2, 4)) == (16, 2, 4)


def test_two_axes_of_one_array_never_share_a_mesh_axis():
    spec = partition(mesh_of(2, data=1, fsdp=2), ("embed", "embed"), (4, 4)).spec
    assert spec == PartitionSpec(("fsdp",), None)
