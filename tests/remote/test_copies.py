"""A learner's copies of its inner state on a disk and in a bucket: the newest, whole, of all hosts."""

import time

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from fsspec.implementations.memory import MemoryFileSystem

from ddiloco.disk import array_file
from ddiloco.remote.learner import host_copies, inner_files
from ddiloco.remote.learner.host_copies import KEPT, HostCopies, new_number
from ddiloco.remote.learner.inner_format import InnerFormat
from ddiloco.roles.exchange import InnerState

LEAVES = (jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((5, 7), jnp.bfloat16))
FORMAT = InnerFormat(LEAVES)


class Bucket(MemoryFileSystem):
    """What `gs://` is in these tests; it may refuse."""

    protocol, store, pseudo_dirs, refuses = ("gs", "gcs"), {}, [""], False

    def __init__(self, finalize_on_close=False):
        super().__init__()

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol("memory://" + str(path).removeprefix("gs://"))

    def glob(self, path, **more):
        return [found.removeprefix("/") for found in super().glob(path, **more)]

    def open(self, path, mode="rb", **more):
        if Bucket.refuses:
            raise RuntimeError("403, no such luck\nmore")
        return super().open(path, mode, **more)


@pytest.fixture(params=["disk", "bucket"])
def folder(request, tmp_path, monkeypatch):
    """Where copies go."""
    if request.param == "disk":
        return tmp_path / "copies"
    for name in ("gs", "gcs"):
        fsspec.register_implementation(name, Bucket, clobber=True)
    epath.backend.fsspec_backend._get_filesystem.cache_clear()
    monkeypatch.setattr(Bucket, "store", {})
    monkeypatch.setattr(Bucket, "refuses", False)
    return epath.Path("gs://bucket/run/0")


def arrays(value):
    return [jnp.full(leaf.shape, value, leaf.dtype) for leaf in LEAVES]


def test_the_only_host_s_copy_is_its_newest(folder):
    assert inner_files.load(folder, FORMAT) is None
    for value in (1, 2):
        inner_files.save(folder, FORMAT, InnerState(value, (3, 4), arrays(value), trained=9), "run")
    state = inner_files.load(folder, FORMAT, "run")
    assert (state.step, state.versions, state.trained) == (2, (3, 4), 9)
    for own, leaf in zip(arrays(2), state.arrays, strict=True):
        np.testing.assert_array_equal(own, leaf)
    with pytest.raises(inner_files.InnerFileError, match="another run"):
        inner_files.load(folder, FORMAT, "another")


def test_of_a_host_s_copies_the_two_newest_stay_and_what_is_damaged_does_not_count(folder, monkeypatch):
    copies = HostCopies(folder, 1, FORMAT)
    assert copies.numbers() == []
    numbers = []
    for _ in range(4):
        numbers.append(new_number())
        now = time.time_ns()
        while time.time_ns() // 1000 == now // 1000:  # a microsecond
            pass
    assert numbers == sorted(set(numbers))
    for value, number in enumerate(numbers):
        copies.save(number, arrays(value), {"run": "run"})
    assert copies.numbers() == numbers[: -KEPT - 1 : -1]
    header, blocks = copies.load(numbers[-1])
    assert (header["run"], blocks[0].all) == ("run", 3)
    read: list[str] = []
    load = array_file.load
    monkeypatch.setattr(array_file, "load", lambda path, magic: read.append(path.suffix) or load(path, magic))
    found, about, own = next(copies.readable(numbers[1:-1]))
    assert (found, about["run"], own[0].all) == (numbers[-2], "run", 2)
    assert read == [f".{found}"], "of copies that large none is read but the one that is wanted"
    path = folder / f"inner_state.1.{numbers[-1]}"
    path.write_bytes(path.read_bytes()[:-9])
    assert HostCopies(folder, 1, FORMAT).numbers() == [numbers[-2]]
    assert HostCopies(folder, 0, FORMAT).numbers() == []


def test_where_the_clock_was_set_back_the_newest_copies_stay_all_the_same(folder, monkeypatch):
    HostCopies(folder, 0, FORMAT).save(later := new_number(), arrays(0), {})
    monkeypatch.setattr(host_copies.time, "time_ns", lambda: 3_600_000_000_000)
    copies = HostCopies(folder, 0, FORMAT)
    first, second = new_number(), new_number() + 4
    copies.save(first, arrays(1), {})
    assert copies.numbers() == [later, first]
    copies.save(second, arrays(2), {})
    assert copies.numbers() == [second, first]


def test_a_bucket_that_refuses_is_a_disk_that_does(folder, monkeypatch):
    if not isinstance(folder, epath.gpath.PosixGPath):
        pytest.skip("a bucket's")
    inner_files.save(folder, FORMAT, InnerState(1, (3, 4), arrays(1)))
    monkeypatch.setattr(Bucket, "refuses", True)
    with pytest.raises(OSError, match=r"403, no such luck$"):
        inner_files.save(folder, FORMAT, InnerState(2, (3, 4), arrays(2)))
    with pytest.raises(inner_files.InnerFileError, match="cannot be read: 403"):
        inner_files.load(folder, FORMAT)
    monkeypatch.setattr(Bucket, "refuses", False)
    assert inner_files.load(folder, FORMAT).step == 1
