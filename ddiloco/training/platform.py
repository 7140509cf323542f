"""Set-up of JAX and memory in a process, before its first array."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import MutableMapping

import jax
from jax.sharding import Mesh

from ddiloco.config import ConfigError
from ddiloco.training.memory import keep_freed_memory

# What lets collectives go on beside matmuls, by the platform of the devices. Beyond this libtpu does it by
# default: in windows of a matmul (v5p, v6e), or in stages beside one (v5e).
_OVERLAP: dict[str, dict[str, str | bool]] = {
    "tpu": {
        "xla_enable_async_all_gather": True,
        "xla_enable_async_collective_permute": True,
        "xla_tpu_enable_async_all_to_all": True,
    },
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True},
}
# What chips of a kind lack the interconnect for: the compiler refuses it.
_MISSING = {"TPU v5 lite": ("xla_tpu_enable_async_all_to_all",)}


def prepare(cache: bool = True, keep_memory: bool = True) -> None:
    """Sets JAX up for learners as threads.

    Args:
      cache: whether to keep compiled programs between runs, in $JAX_COMPILATION_CACHE_DIR or
        ~/.cache/ddiloco/jax: those that take longer to compile than
        $JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS, or 0.1 s.
      keep_memory: whether glibc reuses the buffers of one step for the next.
    """
    # On CPU devices asynchronous dispatch puts all work into the queue of one pool, where a merge would wait
    # as long as learners keep it filled. Run in the calling threads, each gets its share from the system.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if keep_memory:
        keep_freed_memory()
    if cache:
        folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(
            pathlib.Path.home() / ".cache/ddiloco/jax"
        )
        least = os.environ.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS") or "0.1"
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", float(least))
        _keep_only_whole_programs()


def compute_threads() -> int:
    """The number of threads with which XLA computes on CPU devices."""
    given = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(given or cores)


_SLICES, _SLICE = "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"
_WORKERS = "TPU_WORKER_HOSTNAMES"


def check_slices(slices: int, hosts: int, variables: MutableMapping[str, str] = os.environ) -> list[str]:
    """Readies libtpu's variables for a learner of so many slices and hosts; returns those that it removed.

    An allocation of more slices than the learner has sets them for all of it, and a job that was preempted
    may leave its own: libtpu would wait for slices and hosts that are none of this learner's.

    Raises:
      ConfigError: they are of another number of slices or hosts.
    """
    found = sorted(name for name in variables if name.startswith("MEGASCALE_"))
    if slices == 1:
        for name in found:
            del variables[name]
    elif found:
        for name, fits in (
            (_SLICES, lambda value: value == slices),
            (_SLICE, lambda value: 0 <= value < slices),
        ):
            value = variables.get(name, "")
            if not value.isdecimal() or not fits(int(value)):
                must = f"must be of a learner of {slices} slices (config.mesh.slice)"
                raise ConfigError(f"{name}: is {value or 'missing'}, but {must}")
    names, each = variables.get(_WORKERS, ""), hosts // slices
    if hosts > 1 and names and len(names.split(",")) != each:
        count, must = len(names.split(",")), f"but a slice of this learner has {each} (config.remote.hosts)"
        raise ConfigError(f"{_WORKERS}: names {count} hosts, {must}; is it of another job?")
    return found if slices == 1 else []


def compiler_options(mesh: Mesh) -> dict[str, str | bool]:
    """The options of XLA that a program on several of the mesh's devices is compiled with."""
    device: jax.Device = mesh.devices.flat[0]
    missing = _MISSING.get(device.device_kind, ())
    options = _OVERLAP.get(device.platform, {}) if mesh.size > 1 else {}
    return {name: value for name, value in options.items() if name not in missing}


def compute_on_cpu() -> None:
    """Makes JAX use the CPU only, whatever accelerators there are."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")


def _keep_only_whole_programs() -> None:
    """Makes JAX move each compiled program into the cache when it is complete.

    JAX writes a file where other processes read it: of one that a killed process left incomplete, every later
    process would complain, and compile the program again.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src.lru_cache import LRUCache

        if LRUCache.put.__module__ == __name__:
            return
        in_place = LRUCache.put

        def put(cache: LRUCache, key: str, value: bytes) -> None:
            # Under a lock, or in a bucket, where an object is there once it is whole.
            if cache.eviction_enabled or "://" in str(cache.path):
                in_place(cache, key, value)
                return
            with tempfile.TemporaryDirectory(prefix=".new-", dir=cache.path) as folder:
                in_place(LRUCache(folder, max_size=-1), key, value)
                for name in os.listdir(folder):
                    os.replace(os.path.join(folder, name), cache.path / name)

        LRUCache.put = put  # type: ignore[method-assign,assignment]
