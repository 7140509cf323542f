"""Stacks: one array that has the same tensor of several layers as its rows.

The stack `layers/3:26/mlp/up` has in its rows the tensors `layers/3/mlp/up` to `layers/25/mlp/up`. Learners
compute with stacks; fragments, what is sent and what is stored have each layer's tensors by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

_STACK = re.compile(r"((?:.*/)?layers/)(\d+):(\d+)(/.*)")


def stack_name(first: int, stop: int) -> str:
    """What stands for the number of a layer in the names of stacks of the layers `first` to `stop - 1`."""
    return f"{first}:{stop}"


def rows(name: str) -> tuple[str, ...]:
    """The names of the tensors in the rows of a stack; of any other array, its own.

    Example:
      >>> rows("layers/1:3/mlp/up"), rows("embed/table")
      (('layers/1/mlp/up', 'layers/2/mlp/up'), ('embed/table',))
    """
    match = _STACK.fullmatch(name)
    if not match:
        return (name,)
    before, first, stop, after = match.groups()
    return tuple(f"{before}{number}{after}" for number in range(int(first), int(stop)))


def is_stack(name: str) -> bool:
    """Whether an array of this name is a stack."""
    return _STACK.fullmatch(name) is not None


def homes(names: Iterable[str]) -> dict[str, tuple[str, int | None]]:
    """Location of each tensor among arrays of these names: its array, and its row in a stack.

    Example:
      >>> homes(["embed/table", "layers/1:3/up"])["layers/2/up"]
      ('layers/1:3/up', 1)
    """
    return {
        tensor: (name, row if is_stack(name) else None)
        for name in names
        for row, tensor in enumerate(rows(name))
    }


def row_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor, sorted by name, from those of arrays of which some are stacks."""
    found = {
        tensor: shape[1:] if is_stack(name) else shape
        for name, shape in shapes.items()
        for tensor in rows(name)
    }
    return dict(sorted(found.items()))


def array_shape(name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of the array of this name, from the shapes of tensors."""
    parts = rows(name)
    return (len(parts), *shapes[parts[0]]) if is_stack(name) else shapes[name]


def array_of(name: str, params: Mapping[str, Any]) -> Any:
    """The array of this name from tensors, numpy or jax, also under jit; one that is there is no copy."""
    if name in params:
        return params[name]
    tensors = [params[tensor] for tensor in rows(name)]
    return (np if isinstance(tensors[0], np.ndarray) else jnp).stack(tensors)


def stacked(params: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """All arrays of these names, as `array_of` makes them.

    Raises:
      ValueError: `params` has other tensors than these arrays.

    Example:
      >>> stacked({"layers/0/up": np.ones(2), "layers/1/up": np.zeros(2)}, ["layers/0:2/up"])["layers/0:2/up"]
      array([[1., 1.],
             [0., 0.]])
    """
    names = list(names)
    wanted = {part for name in names for part in ((name,) if name in params else rows(name))}
    odd = sorted(params.keys() ^ wanted)
    if odd:
        raise ValueError(f"the parameters differ from the model's in {len(odd)} names, the first {odd[0]}")
    return {name: array_of(name, params) for name in names}


def unstacked(params: Mapping[str, Any]) -> dict[str, Any]:
    """Each tensor, sorted by name, out of arrays of which some are stacks."""
    found = {
        tensor: array[row] if is_stack(name) else array
        for name, array in params.items()
        for row, tensor in enumerate(rows(name))
    }
    return dict(sorted(found.items()))
