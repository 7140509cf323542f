"""One outer step of one fragment: its tensors merged, the outer optimizer's step, and metrics."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ddiloco.arrays.host_memory import aligned, host_device, owned
from ddiloco.outer.codecs import CODECS, Shape, shaped
from ddiloco.outer.encoding import DifferenceEncoder, described
from ddiloco.outer.fragments import FragmentLayout, is_embedding
from ddiloco.outer.merging import MERGE_RULES, Sent, norm_of, normalised
from ddiloco.outer.offers import MeasuredOffer, by_piece
from ddiloco.outer.optimizer import OuterConfig, make_outer_optimizer

Pieces = Sequence[np.ndarray | jax.Array]


class OuterResult(NamedTuple):
    """The result of a round."""

    # The fragment's new pieces, float32 on the CPU device, as every learner will have them
    pieces: tuple[jax.Array, ...]
    opt_state: Any  # the outer optimizer's of each piece, beside what the update codec left out, if not f32
    # `outer_gradient_norm`, of the merged outer gradient; `learner_delta_norm`, the weighted mean of the
    # norms of the learners' own; `cosine`, the mean between those of different learners, 1 for one learner
    metrics: dict[str, float]
    finite: bool = True  # whether every element of the pieces is
    # What leads from the last pieces to these, in the update codec; () where that is f32
    difference: tuple[np.ndarray, ...] = ()


class OuterStep:
    """Makes the next version of a fragment from the learners' offers; its only state is compiled code.

    Each tensor is merged and stepped by programs of its own, with an outer optimizer of its own. Tensors of
    the same shape share them: a model has few shapes, and its fragments many tensors. All take `num_learners`
    contributions, absent ones with weight 0, so that a changing quorum compiles nothing. Offers are decoded
    in the pass that adds them up, and never stored otherwise than encoded.
    """

    def __init__(
        self, layout: FragmentLayout, config: OuterConfig, num_learners: int, of_parameters: bool = True
    ) -> None:
        """Compiles nothing yet.

        `num_learners`: M, the most contributions that a round can have. `of_parameters`: whether these are
        theta_{m,p}, or outer gradients.
        """
        self._layout = layout
        self._config = config
        self._num_learners, self._of_parameters = num_learners, of_parameters
        # By slot of a merge, the codec of the offers that it takes.
        self._codecs = tuple(sorted(config.codec_of(m) for m in range(num_learners)))
        self._device = host_device()
        lossy = config.update_codec != "f32"
        self._encode = DifferenceEncoder(layout, config.update_codec) if lossy else None

    def init(self, pieces: Pieces) -> Any:
        """The outer optimizer's state before the first round of a fragment with these pieces."""
        with jax.default_device(self._device):
            state = self._begun(_readable(pieces))
            return state if self._encode is None else (state, self._zeros(pieces))

    def _begun(self, pieces: Pieces) -> tuple[Any, ...]:
        return tuple(_begin(self._config, piece) for piece in pieces)

    def compile(self, p: int) -> None:
        """Compiles the step of fragment p, unless that was done."""
        list(self._of_tensors(p))
        for codec in self._config.codecs:
            list(self._measuring(p, codec))
        if self._encode is not None:
            self._encode.compile(p)

    def measure(
        self, p: int, pieces: Pieces, arrays: Sequence[np.ndarray], codec: str = "f32"
    ) -> MeasuredOffer:
        """An offer of fragment p, which is read once; for any number of threads at a time.

        `pieces`: Theta_p as it is now. `arrays`: in the `wire_format` of the codec.
        """
        readable, anchor = _readable(arrays), _readable(pieces)
        of_pieces = by_piece(codec, self._layout.piece_shapes(p), readable)
        programs = zip(self._measuring(p, codec), anchor, of_pieces, strict=True)
        norms = np.array([measure(theta, encoded) for measure, theta, encoded in programs], np.float32)
        return MeasuredOffer(codec, readable, norms, pieces if self._of_parameters else None)

    def __call__(
        self,
        p: int,
        pieces: Pieces,
        opt_state: Any,
        offers: Sequence[MeasuredOffer],
        weights: Sequence[float],
        spare: Pieces | None = None,
    ) -> OuterResult:
        """Merges one round of fragment p, and waits for the result.

        Args:
          pieces: Theta_p, float32, numpy or on the CPU device; never written.
          opt_state: the optimizer's state, whose memory the new one takes: do not use it again.
          offers: of up to M learners, measured with these pieces; never written.
          weights: one for each contribution, not negative; only their ratios count.
          spare: jax arrays like `pieces` that nobody needs any more, whose memory the result takes. Where
            a numpy view of one is still alive, the result takes new memory instead.

        Raises:
          ValueError: there are more offers than M, or more in a codec than learners that send in it.
        """
        anchor, slots = _readable(pieces), self._slots(offers)
        by_slot = np.zeros(self._num_learners)
        norms = np.zeros((len(anchor), self._num_learners), np.float32)
        for slot, offer, weight in zip(slots, offers, weights, strict=True):
            by_slot[slot], norms[:, slot] = weight, offer.norms
        shares = normalised(by_slot)
        spare = self._zeros(anchor) if spare is None else tuple(spare)
        opt_state, left_out = (opt_state, ()) if self._encode is None else opt_state
        vectors = self._vectors(p, anchor, dict(zip(slots, offers, strict=True)))
        of_tensors = zip(self._of_tensors(p), spare, opt_state, anchor, vectors, norms, strict=True)
        stepped = [step(*arrays, encoded, shares, own) for step, *arrays, encoded, own in of_tensors]
        results, opt_state, measured = zip(*jax.block_until_ready(stepped), strict=True)
        new, metrics = tuple(results), _metrics(measured, shares)
        if not all(map(operator.attrgetter("finite"), measured)):
            # No step is taken, and moments are reset; counters of rounds are kept.
            opt_state = jax.tree.map(_unless_counted, opt_state, self._begun(anchor))
            return OuterResult(
                new, opt_state if self._encode is None else (opt_state, left_out), metrics, False
            )
        if self._encode is None:
            return OuterResult(new, opt_state, metrics)
        encoded = self._encode(p, anchor, new, left_out)
        return OuterResult(encoded.pieces, (opt_state, encoded.left_out), metrics, difference=encoded.arrays)

    def _slots(self, offers: Sequence[MeasuredOffer]) -> list[int]:
        """The slot of each offer: the next one of its codec."""
        free = {codec: iter([i for i, c in enumerate(self._codecs) if c == codec]) for codec in self._codecs}
        try:
            return [next(free[offer.codec]) for offer in offers]
        except StopIteration:
            raise ValueError(f"there are {len(offers)} offers, more than {self._num_learners}") from None

    def _vectors(
        self, p: int, anchor: Pieces, offers: Mapping[int, MeasuredOffer]
    ) -> Iterator[tuple[tuple[Any, ...], ...]]:
        """Of each tensor the M encoded contributions, from the offers by slot."""
        shapes = self._layout.piece_shapes(p)
        present = {slot: by_piece(offer.codec, shapes, offer.arrays) for slot, offer in offers.items()}
        for i, shape in enumerate(shapes):
            yield tuple(
                present[slot][i]
                if slot in present
                else ((anchor[i],) if CODECS[codec].exact else _absent(codec, shape))
                for slot, codec in enumerate(self._codecs)
            )

    def _zeros(self, pieces: Pieces) -> tuple[jax.Array, ...]:
        return tuple(owned(np.zeros(piece.shape, np.float32), self._device) for piece in pieces)

    def _measuring(self, p: int, codec: str) -> Iterator[jax.stages.Compiled]:
        """For each tensor of fragment p the program that measures it in an offer."""
        for shape in self._layout.piece_shapes(p):
            yield _measuring(shape, codec, self._of_parameters)

    def _of_tensors(self, p: int) -> Iterator[jax.stages.Compiled]:
        """For each tensor of fragment p the program that merges and steps it."""
        for piece, shape in zip(self._layout.fragments[p], self._layout.piece_shapes(p), strict=True):
            rule = rule_of(self._config, piece.name)
            yield _stepping(self._config, rule, shape, self._codecs, self._of_parameters)


def rule_of(config: OuterConfig, name: str) -> str:
    """The merge rule of the tensor with this name."""
    return config.embeddings if config.merge == "rda" and is_embedding(name) else config.merge


class Measured(NamedTuple):
    """Of one tensor: as in `MergedTensor`, and whether its new values are finite."""

    length: jax.Array
    norms: jax.Array
    cosine: jax.Array
    finite: jax.Array


def step_tensor(
    config: OuterConfig, rule: str, theta: jax.Array, opt_state: Any, sent: Sent
) -> tuple[jax.Array, Any, Measured]:
    """Merges what learners sent of one tensor, and takes the outer optimizer's step; for use under jit.

    Returns:
      The tensor's next version, also where it is not finite; the optimizer's next state; and metrics.
    """
    merged = MERGE_RULES[rule](sent)
    gradient = shaped(merged.unscaled, theta.shape) * merged.scale
    updates, opt_state = make_outer_optimizer(config).update(gradient, opt_state, theta)
    new = optax.apply_updates(theta, updates)
    # Of a sum of squares, which is not finite either where an element is not.
    finite = jnp.isfinite(jnp.sum(jnp.square(new * 1e-19)))
    return new, opt_state, Measured(merged.length, merged.norms, merged.cosine, finite)


def _readable(pieces: Pieces) -> tuple[Any, ...]:
    """Pieces that XLA reads where they are: given to a program as they are, they cost no `device_put`."""
    return tuple(aligned(piece) if isinstance(piece, np.ndarray) else piece for piece in pieces)


def _unless_counted(kept: jax.Array, begun: jax.Array) -> jax.Array:
    return kept if jnp.issubdtype(kept.dtype, jnp.integer) else begun


# Kept here and not in each OuterStep, so that all of a process share what one compiled.


@functools.partial(jax.jit, static_argnums=0)
def _begin(config: OuterConfig, piece: jax.Array) -> Any:
    return jax.tree.map(jnp.copy, make_outer_optimizer(config).init(piece))


@functools.cache
def _absent(codec: str, shape: Shape) -> tuple[np.ndarray, ...]:
    """Encoded zeros."""
    return tuple(aligned(np.zeros(*part)) for part in CODECS[codec].formats(shape))


@functools.cache
def _measuring(shape: Shape, codec: str, of_parameters: bool) -> jax.stages.Compiled:
    def measure(anchor: jax.Array, arrays: tuple[jax.Array, ...]) -> jax.Array:
        vector = CODECS[codec].values(arrays, math.prod(shape))
        return norm_of(vector, anchor if of_parameters else None)

    [tensor], arrays = described(CODECS[codec], (shape,), host_device())
    return jax.jit(measure, keep_unused=True).lower(tensor, arrays).compile()


@functools.cache
def _stepping(
    config: OuterConfig, rule: str, shape: Shape, codecs: tuple[str, ...], of_parameters: bool
) -> jax.stages.Compiled:
    alike = len(set(codecs)) == 1

    def values(codec: str, arrays: tuple[jax.Array, ...]) -> jax.Array:
        # With the barrier every pass decodes anew: XLA stores what several passes share.
        arrays = jax.lax.optimization_barrier(arrays)
        # In the codec's own shape, which is twice as fast; in the tensor's where codecs and so shapes differ.
        if alike:
            return CODECS[codec].values(arrays, math.prod(shape))
        return CODECS[codec].decode(arrays, shape)

    def step(
        spare: jax.Array,
        opt_state: Any,
        anchor: jax.Array,
        encoded: tuple[tuple[jax.Array, ...], ...],
        weights: jax.Array,
        norms: jax.Array,
    ) -> tuple[jax.Array, Any, Measured]:
        del spare
        vectors = [functools.partial(values, *each) for each in zip(codecs, encoded, strict=True)]
        sent = Sent(vectors, weights, anchor if of_parameters else None, norms)
        return step_tensor(config, rule, anchor, opt_state, sent)

    of_codec = {codec: described(CODECS[codec], (shape,), host_device()) for codec in codecs}
    ([tensor], _), count = of_codec[codecs[0]], len(codecs)
    state = jax.eval_shape(functools.partial(_begin, config), tensor)
    numbers = jax.ShapeDtypeStruct((count,), jnp.float32, sharding=tensor.sharding)
    # Without `keep_unused`, `spare` would be dropped.
    compiled = jax.jit(step, donate_argnums=(0, 1), keep_unused=True)
    vectors = tuple(of_codec[codec][1] for codec in codecs)
    return compiled.lower(tensor, state, tensor, vectors, numbers, numbers).compile()


def _metrics(measured: Sequence[Measured], weights: np.ndarray) -> dict[str, float]:
    """Those of a fragment, as of `OuterResult`, from those of its tensors."""
    lengths, norms, cosines = (
        np.array([getattr(m, name) for m in measured], np.float64) for name in ("length", "norms", "cosine")
    )
    squares = np.square(norms)  # (pieces, M)
    importance = squares @ weights
    total = importance.sum()
    return {
        "outer_gradient_norm": float(np.linalg.norm(lengths)),
        "learner_delta_norm": float(np.sqrt(squares.sum(0)) @ weights),
        "cosine": float(cosines @ importance / total) if total > 0 else 1.0,
    }
