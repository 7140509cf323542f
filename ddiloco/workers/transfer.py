"""Copies fragments from a learner's devices, and applies updates on them, between steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ddiloco.arrays.blocks import Blocks, Cut, in_host_memory, needed, owned, placed
from ddiloco.arrays.sharded_rows import divides, row_of, row_sharding
from ddiloco.outer.codecs import CODECS
from ddiloco.outer.encoding import encode, wire_format
from ddiloco.outer.fragments import FragmentLayout, assemble, take
from ddiloco.outer.stacks import homes

Arrays = tuple[jax.Array, ...]
Kept = Any  # a jax.Array, or in host memory numpy's, or `Blocks` where a learner has several hosts
Parameters = dict[str, jax.Array]
Shardings = Mapping[str, NamedSharding]


@dataclasses.dataclass(frozen=True)
class Offer:
    """A fragment after a step, encoded, on the devices or `stowed`."""

    arrays: tuple[Kept, ...]  # what the syncer gets, on its way to the host
    # What the encoding left out, in the pieces' shapes; stays with the learner. (): not asked for.
    residual: tuple[Kept, ...] = ()
    # The outer gradient as it is, which stays with it too: with an exact codec `arrays`. (): not kept.
    own: tuple[Kept, ...] = ()
    # The syncer's formats of `arrays` (`ddiloco.outer.encoding.wire_format`). (): their own.
    shapes: tuple[tuple[int, ...], ...] = ()

    def on_host(self) -> tuple[np.ndarray, ...]:
        """The syncer's copy, in host memory; waits for the transfer that was started earlier."""
        arrays = host_arrays(self.arrays)
        shapes = self.shapes or tuple(array.shape for array in arrays)
        return tuple(array.reshape(shape) for array, shape in zip(arrays, shapes, strict=True))

    def stowed(self) -> Offer:
        """The same in host memory: what this of a learner's hosts sends, and what its devices need."""
        sent = tuple(x if isinstance(x, np.ndarray) else in_host_memory(x, owned) for x in self.arrays)
        residual, own = (tuple(map(in_host_memory, kept)) for kept in (self.residual, self.own))
        return dataclasses.replace(self, arrays=sent, residual=residual, own=own)

    def own_blocks(self) -> tuple[Blocks, ...]:
        """Of what the syncer gets, the blocks that this of a learner's hosts sends; waits as `on_host`."""
        return tuple(owned(array) for array in self.arrays)


def host_arrays(arrays: Sequence[Kept]) -> tuple[np.ndarray, ...]:
    """The arrays in host memory; waits for the copy that was started earlier."""
    return tuple(np.asarray(array) for array in arrays)


class FragmentTransfer:
    """Compiled once for all learners on the same mesh; each call works on the arrays with one fragment.

    Arrays may be stacks of layers (`ddiloco.outer.stacks`), of which a fragment has some rows.

    Attributes:
      keeps_anchors: whether offers are outer gradients, from the version that the learner adopted: with a
        lossy codec or rebase, or if others of the run send these.
      error_feedback: whether they take a residual and leave another.
      rebase: whether they also hold it as it is, so that an update can be applied beside later work.
    """

    def __init__(
        self,
        layout: FragmentLayout,
        shardings: Shardings,
        codec: str = "f32",
        error_feedback: bool = False,
        rebase: bool = False,
        gradients: bool = False,
    ) -> None:
        """`gradients`: whether others of the run send outer gradients."""
        self.keeps_anchors = rebase or gradients or not CODECS[codec].exact
        self.error_feedback = error_feedback
        self.rebase = rebase
        self._layout = layout
        kind = shardings, codec, error_feedback, rebase, self.keeps_anchors
        self._fragments = [_Fragment(layout, p, *kind) for p in range(layout.num_fragments)]

    def offer(
        self,
        fragment: int,
        params: Parameters,
        anchor: Sequence[jax.Array] = (),
        residual: Sequence[jax.Array] = (),
    ) -> Offer:
        """The fragment as it is now, encoded on the devices; its copy to the host is under way.

        `anchor`: the adopted version, as `place` gave it, if the codec needs one. `residual`: what to send
        along, with error feedback.
        """
        own = self._fragments[fragment]
        tensors = own.of(params)
        if self.keeps_anchors:
            arrays, left, gradient = own.encode(tensors, tuple(anchor), tuple(residual))
            exact = arrays if self.rebase and own.sends_gradient else gradient
            offer = Offer(arrays, left, exact, own.sent_shapes)
        else:
            offer = Offer(own.copy(tensors))
        for array in offer.arrays:
            array.copy_to_host_async()
        return offer

    def needs(self, fragment: int) -> tuple[Cut, ...]:
        """The blocks of each piece that this process's devices hold."""
        own = self._fragments[fragment]
        return tuple(map(needed, own.placement, own.shapes))

    def place(
        self, fragment: int, pieces: Sequence[np.ndarray | Blocks | jax.Array]
    ) -> tuple[jax.Array, ...]:
        """A global fragment on the devices; each piece is sharded like its tensor if it divides evenly."""
        return placed(tuple(pieces), self._fragments[fragment].placement)

    def apply(
        self,
        fragment: int,
        params: Parameters,
        pieces: Sequence[np.ndarray | Blocks | jax.Array],
        mixing: float,
        anchor: Sequence[jax.Array] = (),
        merged: Sequence[Kept] = (),
    ) -> Parameters:
        """theta_p <- (1 - mixing) Theta_p + mixing theta_p; the fragment's old tensors are donated.

        `pieces` of Theta_p: from the host, or as `place` gave them. With an `anchor`, the version adopted
        before, it is theta_p <- Theta_p + theta_p - (anchor - merged) instead, where `merged` is the `own` of
        the offer that Theta_p contains, wherever that is; (): it contains none.
        """
        own, update = self._fragments[fragment], self.place(fragment, pieces)
        if not self.rebase:
            return {**params, **own.apply(own.of(params), update, np.float32(mixing))}
        # One program for all: an update that keeps nothing, or contains no offer, is rare.
        offered = self.place(fragment, merged) if merged else ()
        kept, flags = (tuple(anchor), offered), (np.bool_(bool(anchor)), np.bool_(bool(merged)))
        given = (arrays or update for arrays in kept)
        return {**params, **own.apply(own.of(params), update, *given, *flags)}

    def whole(self, fragments: Sequence[Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
        """All parameters, on the host, from the pieces of all fragments."""
        return assemble(self._layout, fragments)

    def programs(
        self, fragment: int, params: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, Callable[[], jax.stages.Traced]]:
        """The fragment's `copy` and `apply` for parameters of these shapes and shardings, to be traced."""
        own = self._fragments[fragment]
        tensors, laid = own.of(params), zip(own.shapes, own.placement, strict=True)
        pieces = tuple(jax.ShapeDtypeStruct(shape, np.float32, sharding=at) for shape, at in laid)
        if self.keeps_anchors:
            copy = functools.partial(own.encode.trace, tensors, pieces, pieces if self.error_feedback else ())
        else:
            copy = functools.partial(own.copy.trace, tensors)
        scalar = functools.partial(jax.ShapeDtypeStruct, ())
        flags = scalar(np.bool_), scalar(np.bool_)
        rest = (pieces, pieces, *flags) if self.rebase else (scalar(np.float32),)
        return {"copy": copy, "apply": functools.partial(own.apply.trace, tensors, pieces, *rest)}

    def compile(self, params: Parameters) -> Parameters:
        """Compiles every offer and update now, so that no step waits for it; gives the parameters back."""
        for p, own in enumerate(self._fragments):
            zeros = self.place(p, [np.zeros(shape, np.float32) for shape in own.shapes])
            self.offer(p, params, zeros, zeros if self.error_feedback else ())
            params = self.apply(p, params, zeros, 1.0, *((zeros, zeros) if self.rebase else ()))
        return params


def placement(layout: FragmentLayout, fragment: int, shardings: Shardings) -> tuple[NamedSharding, ...]:
    """Sharding of the pieces of a global fragment on a learner's devices."""
    of, shapes = homes(shardings), dict(layout.shapes)
    return tuple(
        _piece_sharding(shardings, *of[piece.name], shapes[piece.name], shape)
        for piece, shape in zip(layout.fragments[fragment], layout.piece_shapes(fragment), strict=True)
    )


def _piece_sharding(
    shardings: Shardings, array: str, row: int | None, tensor: tuple[int, ...], piece: tuple[int, ...]
) -> NamedSharding:
    """Like its tensor's if the piece divides evenly; else whole on every device."""
    laid = shardings[array] if row is None else row_sharding(shardings[array], tensor)
    return laid if divides(laid, piece) else NamedSharding(laid.mesh, PartitionSpec())


class _Fragment:
    """One fragment of the arrays on a mesh: the compiled functions that take it out and put it back."""

    def __init__(
        self,
        layout: FragmentLayout,
        p: int,
        shardings: Shardings,
        codec: str,
        error_feedback: bool,
        rebase: bool,
        gradients: bool,
    ) -> None:
        self._layout, self._p, self._shardings, self._codec = layout, p, shardings, CODECS[codec]
        self._rebases = rebase
        self._homes = homes(shardings)
        self._arrays = tuple(dict.fromkeys(self._homes[name][0] for name in layout.names(p)))
        self.shapes, self.placement = layout.piece_shapes(p), placement(layout, p, shardings)
        self.sent_shapes = tuple(part.shape for part in wire_format(layout, p, codec))
        self.sends_gradient = gradients and self._codec.exact  # as it is
        kept = error_feedback, rebase or self.sends_gradient
        left, gradient = (self.placement if keeps else () for keeps in kept)
        encoded = (gradient, (), ()) if self.sends_gradient else (None, left, gradient)
        self.copy = jax.jit(self._copy, out_shardings=self.placement)
        self.encode = jax.jit(self._encode, out_shardings=encoded)
        laid = {name: shardings[name] for name in self._arrays}
        self.apply = jax.jit(self._rebase if rebase else self._mix, donate_argnums=0, out_shardings=laid)

    def of(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays that have some of the fragment."""
        return {name: params[name] for name in self._arrays}

    def _take(self, arrays: Parameters) -> tuple[jax.Array, ...]:
        tensors = {name: self._tensor(arrays, *self._homes[name]) for name in self._layout.names(self._p)}
        return take(self._layout, self._p, tensors)

    def _tensor(self, arrays: Parameters, array: str, row: int | None) -> jax.Array:
        return arrays[array] if row is None else row_of(arrays[array], row, self._shardings[array])

    def _put(self, arrays: Parameters, pieces: Sequence[jax.Array]) -> Parameters:
        """The arrays with these pieces in the place of the fragment's."""
        result = dict(arrays)
        for piece, value in zip(self._layout.fragments[self._p], pieces, strict=True):
            array, row = self._homes[piece.name]
            if row is not None:
                begin = (row, piece.start or 0, *[0] * value.ndim)[: value.ndim + 1]
                result[array] = jax.lax.dynamic_update_slice(result[array], value[None], begin)
            elif piece.whole:
                result[array] = value
            else:
                result[array] = result[array].at[piece.start : piece.stop].set(value)
        return result

    def _copy(self, tensors: Parameters) -> tuple[jax.Array, ...]:
        return tuple(jnp.copy(piece) for piece in self._take(tensors))

    def _encode(self, tensors: Parameters, anchor: Arrays, residual: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        laid = [at if isinstance(at, NamedSharding) and at.mesh.size > 1 else None for at in self.placement]
        pieces = self._take(tensors)
        wanted = self._rebases or self.sends_gradient
        gradient = tuple(map(jnp.subtract, anchor, pieces)) if wanted else ()
        if self.sends_gradient:
            return gradient, (), ()
        return *encode(self._codec, pieces, anchor, residual, laid), gradient

    def _mix(self, tensors: Parameters, update: Arrays, mixing: jax.Array) -> Parameters:
        # where, not arithmetic, at mixing 0: an own value of NaN must not survive its overwriting.
        mixed = tuple(
            jnp.where(mixing == 0, theirs, (1 - mixing) * theirs + mixing * ours)
            for ours, theirs in zip(self._take(tensors), update, strict=True)
        )
        return self._put(tensors, mixed)

    def _rebase(
        self,
        tensors: Parameters,
        update: Arrays,
        anchor: Arrays,
        merged: Arrays,
        adds: jax.Array,
        contains: jax.Array,
    ) -> Parameters:
        later = []
        for ours, theirs, origin, sent in zip(self._take(tensors), update, anchor, merged, strict=True):
            then = jnp.where(contains, origin - sent, origin)
            later.append(jnp.where(adds, theirs + (ours - then), theirs))  # where, as in `_mix`
        return self._put(tensors, later)
