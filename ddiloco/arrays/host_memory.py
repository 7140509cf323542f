"""Host arrays that XLA's CPU client reads without a copy, or owns."""

from __future__ import annotations

import math

import jax
import numpy as np
from numpy.typing import DTypeLike

ALIGNMENT = 64  # bytes; XLA copies host arrays that begin elsewhere


def host_device() -> jax.Device:
    """The CPU device of programs over fragments in host memory, whatever the default backend."""
    return jax.local_devices(backend="cpu")[0]


def owned(array: np.ndarray, device: jax.Device) -> jax.Array:
    """A copy in memory that XLA owns, so that it may be donated to a program; compiles nothing."""
    # XLA copies unaligned memory; it keeps aligned memory, even if asked to copy.
    memory = aligned_empty((array.nbytes + array.itemsize,), np.uint8)
    source = memory[array.itemsize :].view(array.dtype).reshape(array.shape)
    np.copyto(source, array)
    placed: jax.Array = jax.device_put(source, device)
    return placed


def aligned_empty(shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> np.ndarray:
    """An uninitialised array that begins at a multiple of 64 bytes, for a fragment to be received into."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def aligned(array: np.ndarray) -> np.ndarray:
    """The array itself if it is contiguous and aligned, otherwise an aligned copy.

    Numpy makes the copy, not XLA: it asks the system for large memory pages, and takes a tenth of the time
    for arrays of 64 MiB.
    """
    if array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0:
        return array
    copy = aligned_empty(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy
