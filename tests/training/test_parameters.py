"""Parameters as a flat dict: names, shapes and first values, without allocating where none is needed."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ddiloco.models import parameter
from ddiloco.models.dense import DenseConfig
from ddiloco.training.parameters import (
    abstract_parameters,
    forward,
    logical_axes,
    num_parameters,
    parameter_shapes,
    sampled_parameters,
)
from ddiloco.training.sharding import parameter_shardings
from tests.training.batches import TINY, mesh_of, packed_batch
from tests.workbench import assert_equal

LAYER_NAMES = (
    "attention/key/kernel",
    "attention/key_norm/scale",
    "attention/out/kernel",
    "attention/query/kernel",
    "attention/query_norm/scale",
    "attention/value/kernel",
    "attention_norm/scale",
    "mlp/down/kernel",
    "mlp/gate/kernel",
    "mlp/up/kernel",
    "mlp_norm/scale",
)


def test_names_are_paths_in_sorted_order_alike_from_shapes_and_from_numbers():
    config = dataclasses.replace(TINY, num_layers=11)
    expected = ["embed/embedding", "final_norm/scale", "head/kernel"]
    expected += [f"layers/{number}/{name}" for number in range(11) for name in LAYER_NAMES]
    assert list(abstract_parameters(config)) == sorted(expected)
    params = dict(sampled_parameters(TINY, 0))
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in params.items()} == {
        name: (leaf.shape, leaf.dtype) for name, leaf in abstract_parameters(TINY).items()
    }
    assert list(params) == list(abstract_parameters(TINY))


def test_every_axis_of_every_parameter_has_a_logical_name():
    axes, shapes = logical_axes(TINY), abstract_parameters(TINY)
    assert axes["layers/0/attention/query/kernel"] == ("embed", "heads", "head_dim")
    assert axes["layers/1/attention/value/kernel"] == ("embed", "kv_heads", "head_dim")
    assert axes["embed/embedding"] == ("vocab", "embed")
    assert {name: len(axes[name]) for name in shapes} == {name: leaf.ndim for name, leaf in shapes.items()}


def test_billions_of_parameters_are_counted_in_closed_form_without_allocating():
    config = DenseConfig(
        vocab_size=2_560_000,
        num_layers=2,
        model_dim=3584,
        num_heads=16,
        num_kv_heads=8,
        head_dim=256,
        mlp_dim=14336,
        tie_embeddings=True,
    )
    before = len(jax.live_arrays())
    count = num_parameters(config)
    attention = 3584 * 256 * (16 + 8 + 8 + 16) + 2 * 256
    assert count == 2_560_000 * 3584 + 2 * (attention + 3 * 3584 * 14336 + 2 * 3584) + 3584
    assert 9.5e9 < count < 9.6e9
    assert len(jax.live_arrays()) <= before  # fewer where those of other tests are let go of meanwhile


def test_first_values_have_the_deviations_of_their_fan_in():
    config = dataclasses.replace(
        TINY, model_dim=64, mlp_dim=256, num_layers=8, vocab_size=512, scan_layers=True
    )
    params = dict(sampled_parameters(config, 3))
    expected = {
        "embed/embedding": 64**-0.5,
        "head/kernel": 64**-0.5,
        "layers/3/attention/query/kernel": 64**-0.5,
        "layers/3/mlp/up/kernel": 64**-0.5,
        "layers/3/mlp/down/kernel": 256**-0.5 / 4,
        "layers/3/attention/out/kernel": 16**-0.5 / 4,
    }
    for name, stddev in expected.items():
        assert np.std(params[name]) == pytest.approx(stddev, rel=0.08), name
    np.testing.assert_array_equal(params["final_norm/scale"], np.ones(64))


def test_seeds_and_layers_differ_and_a_seed_repeats():
    first, again, other = (
        dict(sampled_parameters(TINY, 0)),
        dict(sampled_parameters(TINY, 0)),
        dict(sampled_parameters(TINY, 1)),
    )
    name = "layers/0/mlp/up/kernel"
    np.testing.assert_array_equal(first[name], again[name])
    assert np.abs(first[name] - other[name]).min() > 0
    assert np.abs(first[name] - first["layers/1/mlp/up/kernel"]).min() > 0


@pytest.mark.parametrize("shape", [(1,), (33, 15), (16, 2, 8), (33, 16)])
def test_an_array_has_the_numbers_of_its_own_shape_in_whatever_size_it_is_drawn(shape, monkeypatch):
    monkeypatch.setattr(parameter, "PADDED", 32 * 16)
    normal, seed, name = parameter.Normal(0.3), np.uint32(5), np.uint32(7)
    key = jax.random.fold_in(jax.random.key(seed), name)
    expected = jax.jit(normal, static_argnums=1)(key, shape)
    np.testing.assert_array_equal(normal.sample(seed, name, shape), expected)


def test_stacked_layers_have_the_same_parameters_in_the_rows_of_arrays():
    config = dataclasses.replace(TINY, scan_layers=True)
    assert_equal(dict(sampled_parameters(config, 5)), dict(sampled_parameters(TINY, 5)))
    assert parameter_shapes(config) == parameter_shapes(TINY)
    arrays = abstract_parameters(config)
    assert arrays["layers/0:2/mlp/up/kernel"].shape == (2, 16, 32)
    assert logical_axes(config)["layers/0:2/mlp/up/kernel"] == ("layer", "embed", "mlp")
    assert len(arrays) == len(LAYER_NAMES) + 3
    assert num_parameters(config) == num_parameters(TINY)
    spec = parameter_shardings(config, mesh_of(8, data=1, fsdp=8))["layers/0:2/mlp/up/kernel"].spec
    assert spec == PartitionSpec(None, ("fsdp",), None)


def test_parameters_of_another_model_are_refused():
    batch = packed_batch(0, 1, 8, 32)
    inputs = batch["inputs"], batch["positions"], batch["segments"]
    params = dict(sampled_parameters(TINY, 0))
    with pytest.raises(ValueError, match=r"differ from the model's in 11 names, the first layers/2/"):
        forward(dataclasses.replace(TINY, num_layers=3), params, *inputs)
