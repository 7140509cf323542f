"""Muon: the momentum of each matrix of the layers, made orthogonal; everything else goes by Adam."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from ddiloco.models.parameter import Axes

Matrices = Mapping[str, MuonDimensionNumbers]


def matrices_of(axes: Mapping[str, Axes]) -> dict[str, MuonDimensionNumbers]:
    """Which parameters are matrices, and which of their axes one reads and writes.

    A matrix stands in a layer and leads from the model's width to other axes or back. Each layer of a stack
    and each expert has its own. Embeddings, heads, routers, norms and biases are none.

    Example:
      >>> matrices_of({"layers/0:4/up": ("layer", "embed", "mlp"), "head": ("embed", "vocab")})
      {'layers/0:4/up': MuonDimensionNumbers(reduction_axis=(1,), output_axis=(2,))}
    """
    found = {}
    for name, names in axes.items():
        own = [i for i, axis in enumerate(names) if axis not in ("layer", "expert")]
        if "layers/" not in name or len(own) < 2 or None in names or "embed" not in names:
            continue
        width = (names.index("embed"),)
        rest = tuple(i for i in own if i not in width)
        reads, writes = (width, rest) if width[0] == own[0] else (rest, width)
        found[name] = MuonDimensionNumbers(reduction_axis=reads, output_axis=writes)
    return found


def muon(
    matrices: Matrices,
    momentum: float,
    mu_dtype: str,
    update_rms: float,
    others: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for these matrices: Nesterov's momentum, five steps of Newton and Schulz.

    Args:
      matrices: which, as `matrices_of` finds them.
      momentum: decay of the mean of gradients.
      mu_dtype: the type in which that mean is kept.
      update_rms: the root mean square of an update of full rank before the learning rate, whatever the shape
        (arXiv 2502.16982, equation 4: 0.2 is Adam's, so that both parts share a learning rate).
      others: moves all other parameters.
    """

    def dimensions(params: Mapping[str, Any]) -> dict[str, MuonDimensionNumbers | optax.MaskedNode]:
        return {name: matrices.get(name, optax.MaskedNode()) for name in params}

    def scaled(name: str, x: Any) -> Any:
        if name not in matrices:  # masked
            return x
        sides = (math.prod(x.shape[i] for i in side) for side in matrices[name])
        return x * (update_rms * math.sqrt(max(sides)))

    inner = scale_by_muon(beta=momentum, mu_dtype=mu_dtype, weight_dimension_numbers=dimensions)
    scale = optax.stateless(lambda updates, _: {name: scaled(name, x) for name, x in updates.items()})
    parts = {"matrices": optax.chain(inner, scale), "others": others}
    return optax.partition(
        parts, lambda params: {n: "matrices" if n in matrices else "others" for n in params}
    )
