"""Array files keep values, shapes and dtypes, those that NumPy lacks too."""

import jax.numpy as jnp
import numpy as np
import pytest

from ddiloco.disk import array_file


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int64"])
def test_what_is_saved_is_loaded(dtype, tmp_path):
    array = np.asarray(jnp.arange(6), jnp.dtype(dtype)).reshape(2, 3)
    array_file.save(tmp_path / "file", b"magic\n", {"step": 3}, [array, array[:0]])
    header, arrays = array_file.load(tmp_path / "file", b"magic\n")
    assert header == {"step": 3}
    for found, expected in zip(arrays, (array, array[:0]), strict=True):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        np.testing.assert_array_equal(found, expected)
