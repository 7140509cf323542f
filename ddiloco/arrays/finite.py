"""Checks that arrays from a file or a peer are finite."""

from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np

_BLOCK = 1 << 18  # elements; temporary arrays of this size stay in the processor's cache
_EXPONENT = np.uint16(0x7F80)  # of bfloat16: all bits set where a number is not finite


class NotFiniteError(ValueError):
    """An array holds NaN or infinity; the message is one line and names it."""


def is_finite(array: np.ndarray) -> bool:
    """Whether all elements are finite, as integers always are; contiguous arrays are not copied.

    Example:
      >>> is_finite(np.float32([1, 2])), is_finite(np.float32([1, np.nan])), is_finite(np.int32([1]))
      (True, False, True)
    """
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return True
    flat = array.reshape(-1)
    blocks = (flat[at : at + _BLOCK] for at in range(0, flat.size, _BLOCK))
    if array.dtype == jnp.bfloat16:  # for which np.isfinite takes ten times as long
        return all(((block.view(np.uint16) & _EXPONENT) != _EXPONENT).all() for block in blocks)
    return all(np.isfinite(block).all() for block in blocks)


def check_finite(arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Raises NotFiniteError at the first of (name, array) that is not finite."""
    for name, array in arrays:
        if not is_finite(array):
            raise NotFiniteError(f"{name} holds numbers that are not finite")


def check_state(arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """As `check_finite`, but for the state of an inner optimizer, whose scalars may be infinite or NaN.

    For instance, optax's reduce_on_plateau keeps the best loss so far, which begins as infinity.
    """
    check_finite((name, array) for name, array in arrays if array.ndim)
