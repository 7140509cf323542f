"""Copies fragments from a learner's devices, and applies updates on them, between steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ddiloco.outer.blocks import Blocks, Cut, needed, owned, placed
from ddiloco.outer.codecs import CODECS, Codec
from ddiloco.outer.encoding import encode, wire_format
from ddiloco.outer.fragments import FragmentLayout, assemble, take
from ddiloco.outer.sharded_rows import divides, row_of, row_sharding
from ddiloco.outer.stacks import homes

Parameters = dict[str, jax.Array]
Shardings = Mapping[str, NamedSharding]


@dataclasses.dataclass(frozen=True)
class Offer:
    """A fragment after a step, encoded, on the devices."""

    arrays: tuple[jax.Array, ...]  # what the syncer gets, on its way to the host
    # What the encoding left out, in the pieces' shapes; stays with the learner. (): not asked for.
    residual: tuple[jax.Array, ...] = ()
    own: tuple[jax.Array, ...] = ()  # the fragment itself, which stays with the learner too. (): not kept.
    # Those of `arrays` for the syncer, as `ddiloco.outer.encoding.wire_format` says. (): their own.
    shapes: tuple[tuple[int, ...], ...] = ()

    def on_host(self) -> tuple[np.ndarray, ...]:
        """What the syncer gets, in host memory; waits for the copy that was started earlier."""
        arrays = host_arrays(self.arrays)
        shapes = self.shapes or tuple(array.shape for array in arrays)
        return tuple(array.reshape(shape) for array, shape in zip(arrays, shapes, strict=True))

    def own_blocks(self) -> tuple[Blocks, ...]:
        """Of what the syncer gets, the blocks that this of a learner's hosts sends; waits as `on_host`."""
        return tuple(owned(array) for array in self.arrays)


def host_arrays(arrays: Sequence[jax.Array]) -> tuple[np.ndarray, ...]:
    """The arrays in host memory; waits for the copy that was started earlier."""
    return tuple(np.asarray(array) for array in arrays)


class FragmentTransfer:
    """Compiled once for all learners on the same mesh; each call works on the arrays with one fragment.

    Arrays may be stacks of layers (`ddiloco.outer.stacks`), of which a fragment has some rows.

    Attributes:
      keeps_anchors: whether offers are encoded against the version that the learner adopted.
      error_feedback: whether they take a residual and leave another.
      rebase: whether offers hold the fragment itself, so that an update can be applied beside later work.
    """

    def __init__(
        self,
        layout: FragmentLayout,
        shardings: Shardings,
        codec: str = "f32",
        error_feedback: bool = False,
        rebase: bool = False,
    ) -> None:
        self.keeps_anchors = not CODECS[codec].of_parameters
        self.error_feedback = error_feedback
        self.rebase = rebase
        self._layout = layout
        of = homes(shardings)
        self._names = [
            tuple(dict.fromkeys(of[name][0] for name in layout.names(p))) for p in range(layout.num_fragments)
        ]
        self._placement = [placement(layout, p, shardings) for p in range(layout.num_fragments)]
        self._shapes = [
            tuple(part.shape for part in wire_format(layout, p, codec)) for p in range(layout.num_fragments)
        ]
        self._own = [
            jax.jit(functools.partial(_copy, layout, shardings, p), out_shardings=self._placement[p])
            for p in range(layout.num_fragments)
        ]
        self._take = [
            jax.jit(
                functools.partial(_encode, layout, shardings, p, CODECS[codec], self._placement[p]),
                out_shardings=(None, self._placement[p] if error_feedback else ()),
            )
            if self.keeps_anchors
            else self._own[p]
            for p in range(layout.num_fragments)
        ]
        self._mix, self._rebase = (
            [
                jax.jit(
                    functools.partial(function, layout, shardings, p),
                    donate_argnums=0,
                    out_shardings={name: shardings[name] for name in self._names[p]},
                )
                for p in range(layout.num_fragments)
            ]
            for function in (_mix, _rebased)
        )

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
        tensors = {name: params[name] for name in self._names[fragment]}
        if self.keeps_anchors:
            arrays, left = self._take[fragment](tensors, tuple(anchor), tuple(residual))
            offer = Offer(arrays, left, shapes=self._shapes[fragment])
        else:
            offer = Offer(self._take[fragment](tensors))
        for array in offer.arrays:
            array.copy_to_host_async()
        if not self.rebase:
            return offer
        own = self._own[fragment](tensors) if self.keeps_anchors else offer.arrays
        return dataclasses.replace(offer, own=own)

    def needs(self, fragment: int) -> tuple[Cut, ...]:
        """The blocks of each piece that this process's devices hold."""
        laid = zip(self._placement[fragment], self._layout.piece_shapes(fragment), strict=True)
        return tuple(needed(sharding, shape) for sharding, shape in laid)

    def place(
        self, fragment: int, pieces: Sequence[np.ndarray | Blocks | jax.Array]
    ) -> tuple[jax.Array, ...]:
        """A global fragment on the devices; each piece is sharded like its tensor if it divides evenly."""
        return placed(tuple(pieces), self._placement[fragment])

    def apply(
        self,
        fragment: int,
        params: Parameters,
        pieces: Sequence[np.ndarray | Blocks | jax.Array],
        mixing: float,
        offered: Sequence[jax.Array] = (),
    ) -> Parameters:
        """theta_p <- (1 - mixing) Theta_p + mixing theta_p; the fragment's old tensors are donated.

        `pieces` of Theta_p: from the host, or as `place` gave them. With `offered`, an offer's `own`, it is
        theta_p <- Theta_p + theta_p - offered instead.
        """
        tensors = {name: params[name] for name in self._names[fragment]}
        update = self.place(fragment, pieces)
        if offered:
            return {**params, **self._rebase[fragment](tensors, update, tuple(offered))}
        return {**params, **self._mix[fragment](tensors, update, np.float32(mixing))}

    def whole(self, fragments: Sequence[Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
        """All parameters, on the host, from the pieces of all fragments."""
        return assemble(self._layout, fragments)

    def programs(
        self, fragment: int, params: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, Callable[[], jax.stages.Traced]]:
        """The fragment's `copy` and `apply` for parameters of these shapes and shardings, to be traced."""
        tensors = {name: params[name] for name in self._names[fragment]}
        pieces = tuple(
            jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)
            for shape, sharding in zip(
                self._layout.piece_shapes(fragment), self._placement[fragment], strict=True
            )
        )
        encoded = (tensors, pieces, pieces if self.error_feedback else ())
        copied = encoded if self.keeps_anchors else (tensors,)
        found = {"copy": functools.partial(self._take[fragment].trace, *copied)}
        if self.rebase:
            found["apply"] = functools.partial(self._rebase[fragment].trace, tensors, pieces, pieces)
        else:
            mixing = jax.ShapeDtypeStruct((), np.float32)
            found["apply"] = functools.partial(self._mix[fragment].trace, tensors, pieces, mixing)
        return found

    def compile(self, params: Parameters) -> Parameters:
        """Compiles every offer and update now, so that no step waits for it; gives the parameters back."""
        for p in range(self._layout.num_fragments):
            zeros = self.place(p, [np.zeros(shape, np.float32) for shape in self._layout.piece_shapes(p)])
            self.offer(p, params, zeros, zeros if self.error_feedback else ())
            params = self.apply(p, params, zeros, 1.0)
            if self.rebase:
                params = self.apply(p, params, zeros, 0.0, zeros)
        return params


def placement(layout: FragmentLayout, fragment: int, shardings: Shardings) -> tuple[NamedSharding, ...]:
    """Where the pieces of a global fragment lie on a learner's devices."""
    of, shapes = homes(shardings), dict(layout.shapes)
    return tuple(
        _piece_sharding(_tensor_sharding(shardings, *of[piece.name], shapes[piece.name]), shape)
        for piece, shape in zip(layout.fragments[fragment], layout.piece_shapes(fragment), strict=True)
    )


def _tensor_sharding(
    shardings: Shardings, array: str, row: int | None, shape: tuple[int, ...]
) -> NamedSharding:
    return shardings[array] if row is None else row_sharding(shardings[array], shape)


def _piece_sharding(tensor: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Like its tensor's if the piece divides evenly; else whole on every device."""
    return tensor if divides(tensor, shape) else NamedSharding(tensor.mesh, PartitionSpec())


def _take(
    layout: FragmentLayout, shardings: Shardings, fragment: int, arrays: Parameters
) -> tuple[jax.Array, ...]:
    of = homes(arrays)
    tensors = {name: _tensor(arrays, shardings, *of[name]) for name in layout.names(fragment)}
    return take(layout, fragment, tensors)


def _tensor(arrays: Parameters, shardings: Shardings, array: str, row: int | None) -> jax.Array:
    return arrays[array] if row is None else row_of(arrays[array], row, shardings[array])


def _put(
    layout: FragmentLayout, fragment: int, arrays: Parameters, pieces: Sequence[jax.Array]
) -> Parameters:
    """The arrays with these pieces in the place of the fragment's."""
    of, result = homes(arrays), dict(arrays)
    for piece, value in zip(layout.fragments[fragment], pieces, strict=True):
        array, row = of[piece.name]
        if row is not None:
            begin = (row, piece.start or 0, *[0] * value.ndim)[: value.ndim + 1]
            result[array] = jax.lax.dynamic_update_slice(result[array], value[None], begin)
        elif piece.whole:
            result[array] = value
        else:
            result[array] = result[array].at[piece.start : piece.stop].set(value)
    return result


def _copy(
    layout: FragmentLayout, shardings: Shardings, fragment: int, tensors: Parameters
) -> tuple[jax.Array, ...]:
    return tuple(jnp.copy(piece) for piece in _take(layout, shardings, fragment, tensors))


def _encode(
    layout: FragmentLayout,
    shardings: Shardings,
    fragment: int,
    codec: Codec,
    placed: tuple[Sharding, ...],
    tensors: Parameters,
    anchor: tuple[jax.Array, ...],
    residual: tuple[jax.Array, ...],
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    placements = [
        sharding if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None
        for sharding in placed
    ]
    return encode(codec, _take(layout, shardings, fragment, tensors), anchor, residual, placements)


def _mix(
    layout: FragmentLayout,
    shardings: Shardings,
    fragment: int,
    tensors: Parameters,
    update: tuple[jax.Array, ...],
    mixing: jax.Array,
) -> Parameters:
    own = _take(layout, shardings, fragment, tensors)
    # where, not arithmetic, at mixing 0: an own value of NaN must not survive its overwriting.
    mixed = tuple(
        jnp.where(mixing == 0, theirs, (1 - mixing) * theirs + mixing * ours)
        for ours, theirs in zip(own, update, strict=True)
    )
    return _put(layout, fragment, tensors, mixed)


def _rebased(
    layout: FragmentLayout,
    shardings: Shardings,
    fragment: int,
    tensors: Parameters,
    update: tuple[jax.Array, ...],
    offered: tuple[jax.Array, ...],
) -> Parameters:
    own = _take(layout, shardings, fragment, tensors)
    later = tuple(theirs + (ours - then) for ours, theirs, then in zip(own, update, offered, strict=True))
    return _put(layout, fragment, tensors, later)
