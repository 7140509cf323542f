"""Devices carved into meshes, and parameters laid on them."""

import dataclasses
import types
import warnings

import jax
import pytest
from jax.sharding import PartitionSpec

from ddiloco.config import ConfigError, build
from ddiloco.run.recipes import ModelRecipe
from ddiloco.settings.experiment import parse
from ddiloco.training.mesh import MeshConfig, carve
from ddiloco.training.sharding import (
    batch_sharding,
    check_context,
    check_divided,
    parameter_shardings,
    partition,
)
from experiments.cli import program
from tests.refusals import refusal
from tests.training.batches import TINY, mesh_of


def test_learners_get_contiguous_equal_groups():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        meshes = carve(jax.devices()[:8], 2, MeshConfig(fsdp=2))
    assert [dict(mesh.shape) for mesh in meshes] == [
        {"slice": 1, "data": 2, "stage": 1, "fsdp": 2, "context": 1, "tensor": 1, "expert": 1}
    ] * 2
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
        (
            1,
            MeshConfig(tensor=3),
            "mesh: data=-1 x tensor=3 needs a multiple of 3 devices",
        ),
        (
            2,
            MeshConfig(data=2),
            "mesh: data=2 needs 2 devices, but a learner has 4",
        ),
        (2, MeshConfig(data=1), "mesh: one device a learner needs 1 devices, but a learner has 4"),
        (1, MeshConfig(slice=3), "mesh: slice=3 x data=-1 needs a multiple of 3 devices"),
        (9, MeshConfig(tensor=2), "needs a multiple of 2 devices, but a learner has 1"),
        (1, MeshConfig(data=1, fsdp=-1, expert=-1, tensor=3), "tensor=3 x expert=-1 needs a multiple of 3"),
    ],
)
def test_a_mesh_that_does_not_fit_is_told_in_a_line(num_learners, config, told):
    assert told in refusal(ConfigError, carve, jax.devices()[:8], num_learners, config)


def test_the_outermost_axis_leads_from_slice_to_slice():
    first, second = carve(jax.devices()[:8], 2, MeshConfig(slice=2, data=1, fsdp=2))
    assert dict(first.shape)["slice"] == 2
    assert [[d.id for d in part.flat] for part in first.devices] == [[0, 1], [2, 3]]
    assert [d.id for d in second.devices.flat] == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("slices", "asked", "told"),
    [
        ([0, 0, 1, 1], 1, "mesh.slice: is 1, but the devices of a learner are 2 of slice 0, 2 of slice 1"),
        ([1, 0, 0, 0], 2, "mesh.slice: is 2, but the devices of a learner are 3 of slice 0, 1 of slice 1"),
    ],
)
def test_no_axis_but_that_of_slices_leads_from_one_to_another(slices, asked, told):
    devices = [types.SimpleNamespace(platform="tpu", slice_index=index) for index in slices]
    config = MeshConfig(slice=asked, data=1, fsdp=-1)
    assert refusal(ConfigError, carve, devices, 1, config) == told


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"fsdp": 0}, "mesh.fsdp: is 0, but must be at least 1, or -1 for what is left"),
        ({"slice": 0}, "mesh.slice: is 0, but must be at least 1"),
        ({"data": -2}, "mesh.data: is -2, but must be at least 1, or -1 for what is left"),
        ({"fsdp": -1}, "mesh.fsdp: is -1, but data is too; only one size may be what is left"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(values, told):
    assert refusal(ConfigError, build, MeshConfig, values, "mesh") == told


def test_matrices_lie_over_fsdp_and_tensor_and_rows_over_data_and_fsdp():
    mesh = mesh_of(8, data=2, fsdp=2, tensor=2)
    specs = {name: sharding.spec for name, sharding in parameter_shardings(TINY, mesh).items()}
    assert specs["embed/embedding"] == PartitionSpec(("tensor",), ("fsdp",))
    assert specs["layers/0/attention/query/kernel"] == PartitionSpec(("fsdp",), ("tensor",), None)
    assert specs["layers/0/mlp/down/kernel"] == PartitionSpec(("tensor",), ("fsdp",))
    assert batch_sharding(mesh).shard_shape((8, 5)) == (2, 5)


def test_what_does_not_divide_the_axis_it_should_divides_another_of_a_large_parameter():
    mesh = mesh_of(4, data=1, tensor=4)
    assert partition(mesh, ("vocab", "embed"), (259, 16)).spec == PartitionSpec(None, None)
    shardings = parameter_shardings(TINY, mesh)
    assert shardings["layers/0/attention/query/kernel"].shard_shape((16, 4, 4)) == (16, 1, 4)
    assert shardings["layers/0/attention/key/kernel"].shard_shape((16, 2, 4)) == (4, 2, 4)
    check_divided(TINY, mesh)


def test_a_parameter_is_as_large_as_it_is_in_all_layers_together():
    mesh = mesh_of(4, data=1, tensor=4)
    config = dataclasses.replace(TINY, num_layers=12, mlp_dim=64, scan_layers=True)
    name = "layers/0:12/attention/key/kernel"
    assert parameter_shardings(config, mesh)[name].spec[-3:] == ("tensor", None, None)
    check_divided(config, mesh)
    with pytest.raises(ConfigError, match=r"^config\.mesh\.tensor: is 4, .*: \d\.\d% of the parameters"):
        check_divided(dataclasses.replace(config, model_dim=18, head_dim=2), mesh)


def test_an_axis_takes_those_of_its_mesh_axes_that_divide_it_best():
    mesh = mesh_of(8, data=1, fsdp=4, expert=2)
    for size, taken in ((16, ("fsdp", "expert")), (12, "fsdp"), (6, "expert"), (5, None)):
        assert partition(mesh, ("embed", None), (size, 3)).spec == PartitionSpec(taken, None)


def test_an_axis_of_no_rule_is_told_in_a_line():
    told = r"^config\.model: has an array with the axes \('pixels', 'embed'\); 'pixels' must be None"
    with pytest.raises(ConfigError, match=told):
        partition(mesh_of(1, data=1), ("pixels", "embed"), (16, 3))


def test_experts_have_their_mesh_axis_alone():
    mesh = mesh_of(8, data=1, fsdp=4, expert=2)
    assert partition(mesh, ("expert", "embed", "mlp"), (4, 8, 3)).spec == PartitionSpec(
        ("expert",), ("fsdp",), None
    )
    assert partition(mesh, ("expert", "embed", "mlp"), (3, 8, 3)).spec == PartitionSpec(None, ("fsdp",), None)


def test_a_large_parameter_that_no_device_would_share_is_told_in_a_line():
    model = parse(program.load_config("configs/moe.py:tiny")).model
    check_divided(model, mesh_of(8, data=1, expert=8))
    model = dataclasses.replace(model, num_experts=12)
    with pytest.raises(ConfigError, match=r"^config\.mesh\.expert: is 8, .*expert 12 x"):
        check_divided(model, mesh_of(8, data=1, expert=8))


@pytest.mark.parametrize(
    ("devices", "shape"),
    [
        (1, (1, 1, 1, 1, 1, 1, 1)),
        (6, (1, 1, 1, 3, 1, 1, 2)),
        (128, (1, 1, 1, 16, 1, 1, 8)),
    ],
)
def test_experts_and_embeddings_share_whatever_devices_there_are(devices, shape):
    assert MeshConfig(data=1, fsdp=-1, expert=-1).shape(devices) == shape


def test_stages_have_layers_of_their_own_and_share_all_else():
    mesh = mesh_of(8, data=2, stage=2, tensor=2)
    config = dataclasses.replace(TINY, num_layers=4, scan_layers=True, stage_repeats=2)
    specs = {name: sharding.spec for name, sharding in parameter_shardings(config, mesh).items()}
    for stack in ("0:2", "2:4"):
        up = specs[f"layers/{stack}/mlp/up/kernel"]
        assert up == PartitionSpec(("stage",), None, ("tensor",))
    assert specs["embed/embedding"] == PartitionSpec(("tensor",), ("stage",))
    assert batch_sharding(mesh).shard_shape((8, 5)) == (2, 5)


def test_what_devices_that_share_positions_cannot_divide_is_told_in_a_line():
    def told(rows=2, heads=4, **sizes):
        model = dataclasses.replace(TINY, num_heads=heads)
        with pytest.raises(ConfigError) as error:
            check_context(model, mesh_of(8, **sizes), rows)
        return str(error.value)

    assert "must divide the model's 6 heads" in told(heads=6, data=2, context=4)
    assert "but must be 1 where mesh.stage is more" in told(data=2, context=2, stage=2)
    assert "needs micro-batches of 2 rows, and they have 4" in told(rows=4, data=2, context=4)
    check_context(TINY, mesh_of(8, data=2, context=4), 2)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"scan_layers": False},
            "config.mesh.stage: is 4, but needs stacks of layers (model.scan_layers)",
        ),
        ({"num_layers": 6}, "config.mesh.stage: is 4, but must divide a stack of 6 layers"),
        (
            {"num_layers": 8, "stage_repeats": 2, "stage_microbatches": 2},
            "config.model.stage_microbatches: is 2, but must be at least mesh.stage 4, "
            "since stage_repeats is 2",
        ),
        (
            {"stage_microbatches": 4, "inner.accumulation": 4},
            "config.train.batch_size: gives 4 rows at a time, but must give a multiple of 8: "
            "4 micro-batches (model.stage_microbatches) of rows for each of 2 shards",
        ),
        ({"stage_repeats": 3}, "config.model.stage_repeats: is 3, but must be a divisor of num_layers 4"),
        (
            {"stage_repeats": 2, "scan_layers": False},
            "config.model.scan_layers: is False, but stage_repeats 2 needs stacks",
        ),
    ],
)
def test_what_stages_cannot_share_is_told_in_a_line(settings, told):
    config = program.load_config("configs/dense.py:tiny")
    config.train.batch_size, config.model.scan_layers = 16, True
    for name, value in settings.items():
        config.update_from_flattened_dict({name if "." in name else f"model.{name}": value})
    assert refusal(ConfigError, lambda: ModelRecipe(parse(config)).check_fit(mesh_of(8, stage=4), 16)) == told


def test_each_device_has_rows_of_each_part_of_an_accumulated_step():
    config = program.load_config("configs/dense.py:tiny")
    config.inner.accumulation, config.eval.batch_size = 2, 8
    recipe = ModelRecipe(parse(config))
    recipe.check_fit(mesh_of(8), 16)
    with pytest.raises(
        ConfigError,
        match=r"^config\.inner\.accumulation: is 2, but a step has 8 rows, which is no multiple of it",
    ):
        recipe.check_fit(mesh_of(8), 8)


def test_two_axes_of_one_array_never_share_a_mesh_axis():
    spec = partition(mesh_of(2, data=1, fsdp=2), ("embed", "embed"), (4, 4)).spec
    assert spec == PartitionSpec(("fsdp",), None)
