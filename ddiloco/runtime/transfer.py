"""Fragments off a learner's devices and updates onto them, at step boundaries."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ddiloco.outer.fragments import FragmentLayout, assemble, put, take

Parameters = dict[str, jax.Array]


class FragmentTransfer:
    """Compiled once for all learners on the same mesh; works on the tensors of one fragment only."""

    def __init__(self, layout: FragmentLayout, shardings: dict[str, NamedSharding]) -> None:
        self._layout = layout
        self._names = [layout.names(p) for p in range(layout.num_fragments)]
        self._placement = [
            tuple(
                _piece_sharding(shardings[piece.name], shape)
                for piece, shape in zip(layout.fragments[p], layout.piece_shapes(p), strict=True)
            )
            for p in range(layout.num_fragments)
        ]
        self._take = [jax.jit(functools.partial(_copy, layout, p)) for p in range(layout.num_fragments)]
        self._mix = [
            jax.jit(
                functools.partial(_mix, layout, p),
                donate_argnums=0,
                out_shardings={name: shardings[name] for name in self._names[p]},
            )
            for p in range(layout.num_fragments)
        ]

    def snapshot(self, fragment: int, params: Parameters) -> tuple[jax.Array, ...]:
        """Copies of the fragment's pieces on the devices, with their copy to the host under way."""
        pieces = self._take[fragment]({name: params[name] for name in self._names[fragment]})
        for piece in pieces:
            piece.copy_to_host_async()
        return pieces

    def apply(
        self, fragment: int, params: Parameters, pieces: Sequence[np.ndarray], mixing: float
    ) -> Parameters:
        """theta_p <- (1 - mixing) Theta_p + mixing theta_p; the fragment's old tensors are donated."""
        tensors = {name: params[name] for name in self._names[fragment]}
        placed = jax.device_put(tuple(pieces), self._placement[fragment])
        mixed = self._mix[fragment](tensors, placed, np.float32(mixing))
        return {**params, **mixed}

    def whole(self, fragments: Sequence[Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
        """All parameters, on the host, from the pieces of all fragments."""
        return assemble(self._layout, fragments)

    def compile(self, params: Parameters) -> Parameters:
        """Compiles every snapshot and update now, so that no step waits for it; gives the parameters back."""
        for p in range(self._layout.num_fragments):
            pieces = [np.asarray(piece) for piece in self.snapshot(p, params)]
            params = self.apply(p, params, pieces, 0.0)
        return params


def _piece_sharding(tensor: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """As its tensor, where the piece divides evenly; else whole on every device."""
    try:
        tensor.shard_shape(shape)
    except ValueError:
        return NamedSharding(tensor.mesh, PartitionSpec())
    return tensor


def _copy(layout: FragmentLayout, fragment: int, tensors: Parameters) -> tuple[jax.Array, ...]:
    return tuple(jnp.copy(piece) for piece in take(layout, fragment, tensors))


def _mix(
    layout: FragmentLayout,
    fragment: int,
    tensors: Parameters,
    update: tuple[jax.Array, ...],
    mixing: jax.Array,
) -> Parameters:
    own = take(layout, fragment, tensors)
    # where, not arithmetic, at mixing 0: an own value of NaN must not survive its overwriting.
    mixed = tuple(
        jnp.where(mixing == 0, theirs, (1 - mixing) * theirs + mixing * ours)
        for ours, theirs in zip(own, update, strict=True)
    )
    return put(layout, fragment, tensors, mixed)
