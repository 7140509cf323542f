"""Stacks of layers: names, and the way from tensors to arrays and back."""

import jax.numpy as jnp
import numpy as np
import pytest

from ddiloco.outer.stacks import array_shape, homes, is_stack, row_shapes, rows, stacked, unstacked

NAMES = ["embed/table", "layers/0/norm", "layers/1:4/mlp/up", "encoder/layers/0:2/norm"]
SHAPES = {"embed/table": (4, 2), "layers/0/norm": (2,)} | {
    **{f"layers/{n}/mlp/up": (2, 3) for n in (1, 2, 3)},
    **{f"encoder/layers/{n}/norm": (5,) for n in (0, 1)},
}


def numbers():
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("library", [np, jnp])
def test_stacking_and_unstacking_are_inverse_and_rows_are_the_layers(library):
    tensors = {name: library.asarray(value) for name, value in numbers().items()}
    arrays = stacked(tensors, NAMES)
    assert {name: array.shape for name, array in arrays.items()} == {
        name: array_shape(name, SHAPES) for name in NAMES
    }
    assert {isinstance(array, np.ndarray) for array in arrays.values()} == {library is np}
    np.testing.assert_array_equal(arrays["layers/1:4/mlp/up"][1], tensors["layers/2/mlp/up"])
    again = unstacked(arrays)
    assert list(again) == sorted(tensors)
    for name, value in tensors.items():
        np.testing.assert_array_equal(again[name], value)
    assert arrays["embed/table"] is tensors["embed/table"]


def test_arrays_that_are_there_are_kept():
    arrays = stacked(numbers(), NAMES)
    assert all(kept is arrays[name] for name, kept in stacked(arrays, NAMES).items())


def test_shapes_and_homes_of_the_tensors():
    assert row_shapes({name: array_shape(name, SHAPES) for name in NAMES}) == SHAPES
    assert homes(NAMES).keys() == SHAPES.keys()
    assert homes(NAMES)["layers/3/mlp/up"] == ("layers/1:4/mlp/up", 2)
    assert homes(NAMES)["layers/0/norm"] == ("layers/0/norm", None)


def test_only_a_range_of_layers_names_a_stack():
    assert [name for name in NAMES if is_stack(name)] == NAMES[2:]
    for name in ("blocks/0:2/up", "layers/0/up", "layers/1-3/up", "mylayers/0:2/up"):
        assert not is_stack(name) and rows(name) == (name,)


def test_another_models_tensors_are_refused():
    with pytest.raises(
        ValueError, match="differ from the model's in 2 names, the first encoder/layers/2/norm"
    ):
        stacked(numbers(), ["embed/table", "layers/0/norm", "layers/1:3/mlp/up", "encoder/layers/0:3/norm"])
