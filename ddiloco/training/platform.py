"""JAX as the runtime needs it; to be called before the first array is made."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import tempfile
import warnings

import jax


def prepare(cache: bool = True, keep_memory: bool = True) -> None:
    """Sets JAX up for learners as threads, and keeps compiled programs between runs.

    The cache is in $JAX_COMPILATION_CACHE_DIR or ~/.cache/ddiloco/jax, of what takes longer to compile than
    $JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS or 0.1. `keep_memory` has glibc reuse the buffers of one step
    for the next.
    """
    # On CPU devices asynchronous dispatch puts all work into one pool, whose queue starves a merge for as
    # long as learners keep it filled; run in the calling threads, each gets its share from the system.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if keep_memory:
        _keep_freed_memory()
    if cache:
        folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(
            pathlib.Path.home() / ".cache/ddiloco/jax"
        )
        least = os.environ.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS") or "0.1"
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", float(least))
        _keep_only_whole_programs()


def compute_on_cpu() -> None:
    """Has JAX use the CPU alone, whatever accelerators there are."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")


def warn_unless_prepared() -> None:
    """Warns if learners on CPU devices would starve the syncer."""
    if jax.default_backend() == "cpu" and jax.config.read("jax_cpu_enable_async_dispatch"):
        warnings.warn(
            "learners on CPU devices will starve the syncer: call ddiloco.training.platform.prepare() "
            "before JAX makes its first array",
            stacklevel=3,
        )


def _keep_only_whole_programs() -> None:
    """Has JAX put a compiled program into the cache at once.

    It writes a file where others read it: half of one, left by a process that was killed meanwhile, would be
    complained about and compiled anew by every process after it.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src.lru_cache import LRUCache

        if LRUCache.put.__module__ == __name__:
            return
        in_place = LRUCache.put

        def put(cache: LRUCache, key: str, value: bytes) -> None:
            if cache.eviction_enabled:  # under a lock
                in_place(cache, key, value)
                return
            with tempfile.TemporaryDirectory(prefix=".new-", dir=cache.path) as folder:
                in_place(LRUCache(folder, max_size=-1), key, value)
                for name in os.listdir(folder):
                    os.replace(os.path.join(folder, name), cache.path / name)

        LRUCache.put = put


def _keep_freed_memory() -> None:
    """Lets glibc reuse the buffers of one step for the next instead of giving them back to the system.

    On CPU devices every step otherwise takes its temporaries as fresh pages: a third of the time of the
    tiny preset. Elsewhere than on glibc nothing changes.
    """
    mmap_threshold, trim_threshold, top_pad, arena_max = -3, -1, -2, -8
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(arena_max, 1)
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, (1 << 31) - 1)
        mallopt(top_pad, 64 << 20)
