"""Muon: the momentum of each matrix of the layers, made orthogonal; everything else goes by Adam."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from ddiloco.models.parameter import Axes

Matrices = Mapping[str, MuonDimensionNumbers]


class MuonState(NamedTuple):
    """The state of either part, in which the parameters that the other one moves do not occur."""

    matrices: optax.OptState
    others: optax.OptState


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
    inner = scale_by_muon(beta=momentum, mu_dtype=mu_dtype, weight_dimension_numbers=lambda _: dict(matrices))

    def init(params: Mapping[str, Any]) -> MuonState:
        mine, rest = _parted(params, matrices)
        return MuonState(inner.init(mine), others.init(rest))

    def update(
        updates: Mapping[str, jax.Array], state: MuonState, params: Mapping[str, jax.Array] | None = None
    ) -> tuple[dict[str, jax.Array], MuonState]:
        del params
        mine, rest = _parted(updates, matrices)
        mine, of_matrices = inner.update(mine, state.matrices)
        rest, of_others = others.update(rest, state.others)
        scaled = {
            name: update * _scale(update.shape, matrices[name], update_rms) for name, update in mine.items()
        }
        return {**scaled, **rest}, MuonState(of_matrices, of_others)

    return optax.GradientTransformation(init, update)


def _parted(arrays: Mapping[str, Any], matrices: Matrices) -> tuple[dict[str, Any], dict[str, Any]]:
    mine = {name: array for name, array in arrays.items() if name in matrices}
    return mine, {name: array for name, array in arrays.items() if name not in matrices}


def _scale(shape: tuple[int, ...], matrix: MuonDimensionNumbers, update_rms: float) -> float:
    sides = (math.prod(shape[i] for i in side) for side in matrix)
    return update_rms * math.sqrt(max(sides))
