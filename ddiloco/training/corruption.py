"""Silent data corruption: finds devices whose results differ when the same step is computed twice."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp


def differing_devices(one: Any, other: Any) -> list[str]:
    """The devices on which two trees of arrays with equal shardings differ in any bit; waits for both.

    Each device compares its own shards. An error in a collective shows on every device that took part.
    """
    pairs: dict[jax.Device, list[tuple[jax.Array, jax.Array]]] = collections.defaultdict(list)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        for mine, theirs in zip(a.addressable_shards, b.addressable_shards, strict=True):
            pairs[mine.device].append((mine.data, theirs.data))
    verdicts = {device: _differ(tuple(shards)) for device, shards in pairs.items()}
    return [str(device) for device, differ in verdicts.items() if differ]


@jax.jit
def _differ(pairs: tuple[tuple[jax.Array, jax.Array], ...]) -> jax.Array:
    return jnp.stack([(_bits(a) != _bits(b)).any() for a, b in pairs]).any()


def _bits(x: jax.Array) -> jax.Array:
    """The bits as integers: a NaN equals itself, and 0 differs from -0."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
