"""A model's parameters as a flat dict of arrays by name, sorted, and its NNX module as a function of them."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from ddiloco.models import model_of
from ddiloco.models.model import Output
from ddiloco.models.parameter import Axes, Constrain, Initializer, unconstrained

Parameters = dict[str, jax.Array]


@functools.cache
def _skeleton(config: Any) -> tuple[nnx.GraphDef, dict[str, tuple[tuple, nnx.Param]]]:
    """The module's graph without arrays, and each parameter's path and shape by name."""
    module = nnx.eval_shape(lambda: model_of(config).module(config, nnx.Rngs(0)))
    graph, state = nnx.split(module)
    slots = {"/".join(map(str, path)): (path, slot) for path, slot in nnx.to_flat_state(state)}
    return graph, dict(sorted(slots.items()))


def abstract_parameters(config: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter, by name; allocates nothing."""
    _, slots = _skeleton(config)
    return {name: jax.ShapeDtypeStruct(slot.shape, slot.dtype) for name, (_, slot) in slots.items()}


def logical_axes(config: Any) -> dict[str, Axes]:
    """The logical name of each axis of every parameter, by name."""
    _, slots = _skeleton(config)
    return {name: slot.get_metadata()["logical_axes"] for name, (_, slot) in slots.items()}


def num_parameters(config: Any) -> int:
    """How many elements the parameters have together."""
    return sum(math.prod(leaf.shape) for leaf in abstract_parameters(config).values())


def init_parameters(
    config: Any, seed: int, shardings: Mapping[str, jax.sharding.Sharding] | None = None
) -> Parameters:
    """Initial float32 parameters; each depends on the seed and its name only, not on depth or mesh.

    With shardings each device makes its own shard; without, all are made on the default device.
    """
    _, slots = _skeleton(config)
    params = {}
    for name, (_, slot) in slots.items():
        draw = _drawing(slot.get_metadata()["initializer"], slot.shape, shardings and shardings[name])
        params[name] = draw(np.uint32(seed), np.uint32(zlib.crc32(name.encode())))
    return params


@functools.cache
def _drawing(
    initializer: Initializer, shape: tuple[int, ...], sharding: jax.sharding.Sharding | None
) -> Callable[[np.uint32, np.uint32], jax.Array]:
    """Compiled for each shape, not for the model: random numbers compile slowly, and layers are alike."""

    def draw(seed: jax.Array, name: jax.Array) -> jax.Array:
        return initializer(jax.random.fold_in(jax.random.key(seed), name), shape)

    return jax.jit(draw, out_shardings=sharding)


def output(
    config: Any,
    params: Mapping[str, jax.Array],
    *inputs: jax.Array,
    constrain: Constrain = unconstrained,
) -> Output:
    """Logits, penalty and sums of the model with these parameters; pure, for use under jit.

    `inputs` are the arrays (B, ...) that its module is called with.

    Raises:
      ValueError: the parameters are not those of this model.
    """
    graph, slots = _skeleton(config)
    if params.keys() != slots.keys():
        odd = sorted(params.keys() ^ slots.keys())
        raise ValueError(f"the parameters differ from the model's in {len(odd)} names, the first {odd[0]}")
    state = nnx.from_flat_state([(path, slot.replace(params[name])) for name, (path, slot) in slots.items()])
    returned = nnx.merge(graph, state)(*inputs, constrain=constrain)
    return returned if isinstance(returned, Output) else Output(returned)


def forward(config: Any, params: Mapping[str, jax.Array], *inputs: jax.Array) -> jax.Array:
    """The logits, float32, of `output`."""
    return output(config, params, *inputs).logits
