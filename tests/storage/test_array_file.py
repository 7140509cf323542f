"""Array files keep values, shapes and dtypes, those that NumPy lacks too."""

import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest

from ddiloco.storage import array_file


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int64"])
def test_what_is_saved_is_loaded(dtype, tmp_path):
    array = np.asarray(jnp.arange(6), jnp.dtype(dtype)).reshape(2, 3)
    saved = [array, array[:0], array[1, 2]]  # the last has no dimension
    array_file.save(tmp_path / "file", b"magic\n", {"step": 3}, saved)
    header, arrays = array_file.load(tmp_path / "file", b"magic\n")
    assert header == {"step": 3}
    for found, expected in zip(arrays, saved, strict=True):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        np.testing.assert_array_equal(found, expected)


def test_a_file_is_in_memory_once_as_it_is_loaded(tmp_path):
    numbers = np.arange(1 << 20, dtype=np.float32)
    arrays = [numbers, np.arange(3, dtype=np.int8), numbers[:9]]
    array_file.save(tmp_path / "file", b"magic\n", {}, arrays)
    tracemalloc.start()
    try:
        _, found = array_file.load(tmp_path / "file", b"magic\n")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1.1 * (tmp_path / "file").stat().st_size
    for array, expected in zip(found, arrays, strict=True):  # though one begins at an odd byte
        np.testing.assert_array_equal(array, expected)
        np.testing.assert_array_equal(jnp.asarray(array), jnp.asarray(expected))


def test_one_changed_bit_is_found_wherever_it_is(tmp_path):
    array_file.save(tmp_path / "file", b"magic\n", {"step": 3}, [np.float32([1, 2])])
    data = (tmp_path / "file").read_bytes()
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
        with pytest.raises(ValueError, match="is damaged"):
            array_file.parse(changed, b"magic\n")
    for end in range(len(data)):
        with pytest.raises(ValueError, match="is damaged"):
            array_file.parse(data[:end], b"magic\n")
