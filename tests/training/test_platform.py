"""Where compiled programs are kept: on a disk and in a bucket."""

import pytest
from jax._src.lru_cache import LRUCache

from tests.bucket import in_memory


@pytest.mark.parametrize("in_bucket", [False, True], ids=["disk", "bucket"])
def test_a_compiled_program_is_kept_whole_and_nothing_beside_it(in_bucket, tmp_path, monkeypatch):
    folder = in_memory(monkeypatch) / "jax" if in_bucket else tmp_path
    cache = LRUCache(str(folder), max_size=-1)
    cache.put("step", b"compiled")
    assert cache.get("step") == b"compiled"
    assert [path.name for path in cache.path.iterdir()] == ["step-cache"]
