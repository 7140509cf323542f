"""Programs on the host that all of a process share: each is compiled once, whoever asks for it first."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from ddiloco.arrays.host_memory import host_device
from ddiloco.outer.codecs import Codec, Shape

Asked = ParamSpec("Asked")
Program = TypeVar("Program")


def shared(compiled: Callable[Asked, Program]) -> Callable[Asked, Program]:
    """A function that compiles, made to do so once for the same arguments; others that ask meanwhile wait.

    Tensors have few shapes, so that a function of one shape is asked for the same again and again.
    """
    locks: collections.defaultdict[tuple[Any, ...], threading.Lock]
    locks = collections.defaultdict(threading.Lock)
    kept: Callable[..., Program] = functools.cache(compiled)

    @functools.wraps(compiled)
    def program(*args: Asked.args, **named: Asked.kwargs) -> Program:
        with locks[(*args, *named.items())]:
            return kept(*args, **named)

    return program


def described(codec: Codec, shape: Shape) -> tuple[jax.ShapeDtypeStruct, tuple[jax.ShapeDtypeStruct, ...]]:
    """A float32 tensor of this shape on the host's device, and the arrays that the codec makes of it."""
    sharding = jax.sharding.SingleDeviceSharding(host_device())
    arrays = tuple(jax.ShapeDtypeStruct(*part, sharding=sharding) for part in codec.formats(shape))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding), arrays
