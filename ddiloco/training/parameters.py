"""A model's parameters as a flat dict of arrays by name, sorted, and its NNX module as a function of them.

There are two forms: by layer, and as the module holds them, in which layers may be stacked
(`ddiloco.outer.stacks`).
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from ddiloco.models import model_of
from ddiloco.models.model import Output, whole_logits
from ddiloco.models.parameter import Axes, Constrain, Initializer, unconstrained
from ddiloco.outer.stacks import homes, is_stack, row_shapes, stacked

Parameters = dict[str, jax.Array]


@functools.cache
def _skeleton(config: Any) -> tuple[nnx.GraphDef, dict[str, tuple[tuple, nnx.Param]]]:
    """The module's graph without arrays, and each parameter's path and shape by name."""
    module = nnx.eval_shape(lambda: model_of(config).module(config, nnx.Rngs(0)))
    graph, state = nnx.split(module)
    slots = {"/".join(map(str, path)): (path, slot) for path, slot in nnx.to_flat_state(state)}
    return graph, dict(sorted(slots.items()))


def abstract_parameters(config: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter as the module holds it, by name; allocates nothing."""
    _, slots = _skeleton(config)
    return {name: jax.ShapeDtypeStruct(slot.shape, slot.dtype) for name, (_, slot) in slots.items()}


def parameter_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by layer, by name."""
    return row_shapes({name: leaf.shape for name, leaf in abstract_parameters(config).items()})


def logical_axes(config: Any) -> dict[str, Axes]:
    """The logical name of each axis of every parameter as the module holds it, by name."""
    _, slots = _skeleton(config)
    return {
        name: (("layer",) if is_stack(name) else ()) + slot.get_metadata()["logical_axes"]
        for name, (_, slot) in slots.items()
    }


def num_parameters(config: Any) -> int:
    """Total number of elements."""
    return sum(math.prod(leaf.shape) for leaf in abstract_parameters(config).values())


def sampled_parameters(config: Any, seed: int) -> Iterator[tuple[str, jax.Array]]:
    """Names and initial float32 parameters one after the other, on the default device.

    Each depends on the seed and its name only, not on depth or mesh.
    """
    _, slots = _skeleton(config)
    shapes, arrays = parameter_shapes(config), homes(slots)
    for name, shape in shapes.items():
        _, slot = slots[arrays[name][0]]
        initializer: Initializer = slot.get_metadata()["initializer"]
        yield name, initializer.sample(np.uint32(seed), np.uint32(zlib.crc32(name.encode())), shape)


def module_of(config: Any, params: Mapping[str, jax.Array]) -> Any:
    """The model's module with these parameters, in either form; pure, for use under jit.

    Raises:
      ValueError: the parameters are not those of this model.
    """
    graph, slots = _skeleton(config)
    arrays = stacked(params, slots)
    state = nnx.from_flat_state([(path, slot.replace(arrays[name])) for name, (path, slot) in slots.items()])
    return nnx.merge(graph, state)


def output(
    config: Any,
    params: Mapping[str, jax.Array],
    *inputs: jax.Array,
    constrain: Constrain = unconstrained,
) -> Output:
    """Logits, penalty and sums of the model with these parameters; pure, for use under jit.

    `params` are in either form; stacking those by layer takes memory for a copy. `inputs` are the arrays
    (B, ...) that its module is called with.

    Raises:
      ValueError: the parameters are not those of this model.
    """
    returned = module_of(config, params)(*inputs, constrain=constrain)
    return returned if isinstance(returned, Output) else Output(returned)


def forward(config: Any, params: Mapping[str, jax.Array], *inputs: jax.Array) -> jax.Array:
    """The logits, float32, of `output`."""
    return whole_logits(output(config, params, *inputs).logits)
