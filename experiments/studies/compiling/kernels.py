"""Operations of Pallas kernels, into which XLA does not see: from the traced program, loops counted fully."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend import core


def kernel_flops(jaxpr: core.Jaxpr, chips: int) -> float:
    """Matmul operations of all Pallas kernels on one chip.

    A block that a kernel may skip counts as not skipped, so that a causal mask makes no difference.
    """
    return _flops(jaxpr, chips, inside=False)


def _flops(jaxpr: core.Jaxpr, chips: int, inside: bool) -> float:
    return sum(_of_equation(equation, chips, inside) for equation in jaxpr.eqns)


def _of_equation(equation: core.JaxprEqn, chips: int, inside: bool) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _dot_flops(equation) / chips if inside else 0.0
    if name == "pallas_call":
        turns = math.prod(size for size in params["grid_mapping"].grid if isinstance(size, int))
        return turns * _flops(params["jaxpr"], chips, inside=True)
    if name == "shard_map":  # whose body is one chip's share
        chips = 1
    found = [_flops(inner, chips, inside) for inner in _jaxprs(params)]
    if name == "cond":
        return max(found)
    return params.get("length", 1) * sum(found) if name == "scan" else sum(found)


def _dot_flops(equation: core.JaxprEqn) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return 2.0 * math.prod(result) * math.prod(left[axis] for axis in contracted)


def _jaxprs(params: Mapping[str, Any]) -> Iterator[core.Jaxpr]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, core.Jaxpr):
                yield item
