"""A bucket that is in memory."""

import fsspec
import pytest
from etils import epath
from fsspec.implementations.memory import MemoryFileSystem


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


def in_memory(monkeypatch: pytest.MonkeyPatch) -> epath.Path:
    """An empty bucket."""
    for name in ("gs", "gcs"):
        fsspec.register_implementation(name, Bucket, clobber=True)
    epath.backend.fsspec_backend._get_filesystem.cache_clear()
    monkeypatch.setattr(Bucket, "store", {})
    monkeypatch.setattr(Bucket, "refuses", False)
    return epath.Path("gs://bucket")
