"""One outer step of one fragment: its tensors merged, the outer optimizer's step, and metrics."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ddiloco.arrays.host_memory import aligned, host_device, owned
from ddiloco.outer.codecs import CODECS, Shape, shaped
from ddiloco.outer.encoding import DifferenceEncoder, by_piece
from ddiloco.outer.fragments import FragmentLayout, is_embedding, kind_of
from ddiloco.outer.merging import DIRECT, MERGE_RULES, MIXES, MergedTensor, Sent, norm_of, normalised, summed
from ddiloco.outer.offers import MeasuredOffer
from ddiloco.outer.optimizer import OuterConfig, make_outer_optimizer
from ddiloco.outer.programs import described, shared

Pieces = Sequence[np.ndarray | jax.Array]

BLOCK = 8  # offers that are added up in one pass; for more the sum is read and written once more each


class OuterResult(NamedTuple):
    """The result of a round."""

    # The fragment's new pieces, float32 on the CPU device, as every learner will have them
    pieces: tuple[jax.Array, ...]
    opt_state: Any  # the outer optimizer's of each piece, beside what the update codec left out, if not f32
    # `outer_gradient_norm`, of the merged outer gradient; `learner_delta_norm`, the weighted mean of the
    # norms of the learners' own; `cosine`, the mean between those of different learners, 1 for one learner,
    # and `cosine/KIND`, that of the tensors of a kind
    metrics: dict[str, float]
    finite: bool = True  # whether every element of the pieces is
    # What leads from the last pieces to these, in the update codec; () where that is f32
    difference: tuple[np.ndarray, ...] = ()


class OuterStep:
    """Makes the next version of a fragment from the learners' offers; its only state is compiled code.

    Each tensor is merged and stepped by programs of its own, with an outer optimizer of its own. Tensors of
    the same shape share them: a model has few shapes, and its fragments many tensors. Offers are decoded in
    the pass that adds them up, `BLOCK` at a time, and never stored otherwise than encoded. So a changing
    quorum compiles nothing, and a round costs what its offers do, however many learners there are. Only rules
    that are no `Mix` take all M at once, absent ones with weight 0.
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
        self._block = min(num_learners, BLOCK)
        # By slot of a merge of all at once, the codec of the offers that it takes.
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
        several = self._num_learners > self._block or len(self._config.codecs) > 1
        for rule, shape in zip(self._rules(p), self._layout.piece_shapes(p), strict=True):
            _stepping(self._config, shape)
            for codec in self._config.codecs:
                _measuring(shape, codec, self._of_parameters)
                if rule in MIXES:
                    self._adding(shape, codec, more=False)
                if rule in MIXES and several:
                    self._adding(shape, codec, more=True)
            if rule not in MIXES:
                self._merging(rule, shape)
        if self._encode is not None:
            self._encode.compile(p)

    def measure(
        self, p: int, pieces: Pieces, arrays: Sequence[np.ndarray], codec: str = "f32"
    ) -> MeasuredOffer:
        """An offer of fragment p, which is read once; for any number of threads at a time.

        `pieces`: Theta_p as it is now. `arrays`: in the `wire_format` of the codec.
        """
        readable, anchor = _readable(arrays), _readable(pieces)
        shapes = self._layout.piece_shapes(p)
        norms = [
            _measuring(shape, codec, self._of_parameters)(theta, encoded)
            for shape, theta, encoded in zip(shapes, anchor, by_piece(codec, shapes, readable), strict=True)
        ]
        known = pieces if self._of_parameters else None
        return MeasuredOffer(codec, readable, np.array(norms, np.float32), known)

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
        if len(offers) > self._num_learners:
            raise ValueError(f"there are {len(offers)} offers, more than {self._num_learners}")
        anchor, shapes = _readable(pieces), self._layout.piece_shapes(p)
        memories = self._zeros(anchor) if spare is None else tuple(spare)
        opt_state, left_out = (opt_state, ()) if self._encode is None else opt_state
        shares = normalised(weights)
        encoded = [by_piece(offer.codec, shapes, offer.arrays) for offer in offers]
        merged, stepped = [], []
        for i, (rule, memory, state) in enumerate(zip(self._rules(p), memories, opt_state, strict=True)):
            sent = [_Encoded(o.codec, own[i], o.norms[i]) for o, own in zip(offers, encoded, strict=True)]
            merge = self._mixed if rule in MIXES else self._merged
            one = merge(rule, memory, anchor[i], sent, shares)
            merged.append(one)
            step = _stepping(self._config, shapes[i])
            stepped.append(step(one.unscaled, state, anchor[i], np.float32(one.scale)))
        new, opt_state, finite = zip(*jax.block_until_ready(stepped), strict=True)
        metrics = _metrics(merged, shares, [kind_of(piece.name) for piece in self._layout.fragments[p]])
        if not all(finite):
            # No step is taken, and moments are reset; counters of rounds are kept.
            opt_state = jax.tree.map(_unless_counted, opt_state, self._begun(anchor))
            return OuterResult(
                new, opt_state if self._encode is None else (opt_state, left_out), metrics, False
            )
        if self._encode is None:
            return OuterResult(new, opt_state, metrics)
        difference = self._encode(p, anchor, new, left_out)
        opt_state = opt_state, difference.left_out
        return OuterResult(difference.pieces, opt_state, metrics, difference=difference.arrays)

    def _mixed(
        self, rule: str, memory: Any, anchor: Any, sent: Sequence[_Encoded], shares: np.ndarray
    ) -> MergedTensor:
        """What a rule that is a `Mix` makes of the contributions to one tensor, in this memory."""
        norms = np.where(shares > 0, np.array([one.norm for one in sent], np.float32), np.float32(0))
        total = memory
        with np.errstate(all="ignore"):  # as in XLA: what is not finite is found in the result
            for mix in (MIXES[rule], DIRECT):
                scales = mix.scales(shares, norms)
                total, length = self._sum(total, anchor, sent, scales)
                if not mix.is_short(scales, norms, length):
                    break
            return mix.merged(total, length, shares, norms, scales)

    def _sum(
        self, memory: jax.Array, anchor: Any, sent: Sequence[_Encoded], scales: np.ndarray
    ) -> tuple[jax.Array, np.float32]:
        """The sum of the contributions, each times a number, and its norm."""
        total, length, more = memory, np.float32(0), False
        for codec in sorted({one.codec for one in sent}) or self._config.codecs[:1]:
            of_codec = [m for m, one in enumerate(sent) if one.codec == codec]
            for first in range(0, max(1, len(of_codec)), self._block):
                block = of_codec[first : first + self._block]
                missing = self._block - len(block)
                arrays = [sent[m].arrays for m in block] + [_absent(codec, anchor)] * missing
                numbers = np.zeros(self._block, np.float32)
                numbers[: len(block)] = scales[block]
                add = self._adding(tuple(anchor.shape), codec, more)
                total, length = add(total, anchor, tuple(arrays), numbers)
                more = True
        return total, np.float32(length)

    def _merged(
        self, rule: str, memory: Any, anchor: Any, sent: Sequence[_Encoded], shares: np.ndarray
    ) -> MergedTensor:
        """What any other rule makes of all contributions to one tensor at once, in this memory."""
        shape, count = tuple(anchor.shape), len(self._codecs)
        arrays = [_absent(codec, anchor) for codec in self._codecs]
        numbers = np.zeros((2, count), np.float32)
        free = {codec: iter([i for i, c in enumerate(self._codecs) if c == codec]) for codec in self._codecs}
        try:
            slots = [next(free[one.codec]) for one in sent]
        except StopIteration:
            raise ValueError(f"of {len(sent)} offers more are in a codec than learners send in it") from None
        for slot, one, share in zip(slots, sent, shares, strict=True):
            arrays[slot], numbers[:, slot] = one.arrays, (share, one.norm)
        merged: MergedTensor = self._merging(rule, shape)(memory, anchor, tuple(arrays), *numbers)
        return merged._replace(norms=np.asarray(merged.norms)[slots])

    def _zeros(self, pieces: Pieces) -> tuple[jax.Array, ...]:
        return tuple(owned(np.zeros(piece.shape, np.float32), self._device) for piece in pieces)

    def _rules(self, p: int) -> Iterator[str]:
        """The merge rule of each tensor of fragment p."""
        return (rule_of(self._config, piece.name) for piece in self._layout.fragments[p])

    def _adding(self, shape: Shape, codec: str, more: bool) -> jax.stages.Compiled:
        return _adding(shape, (codec,) * self._block, self._of_parameters, more)

    def _merging(self, rule: str, shape: Shape) -> jax.stages.Compiled:
        return _merging(rule, shape, self._codecs, self._of_parameters)


class _Encoded(NamedTuple):
    """A contribution to one tensor."""

    codec: str
    arrays: tuple[Any, ...]
    norm: np.float32


def rule_of(config: OuterConfig, name: str) -> str:
    """The merge rule of the tensor with this name."""
    return config.embeddings if config.merge == "rda" and is_embedding(name) else config.merge


def step_tensor(
    config: OuterConfig, unscaled: jax.Array, scale: jax.Array | float, theta: jax.Array, opt_state: Any
) -> tuple[jax.Array, Any, jax.Array]:
    """Takes the outer optimizer's step with a merged outer gradient, as `MergedTensor`; for use under jit.

    Returns:
      The tensor's next version, also where it is not finite; the optimizer's next state; and whether it is.
    """
    updates, opt_state = make_outer_optimizer(config).update(unscaled * scale, opt_state, theta)
    new = optax.apply_updates(theta, updates)
    # Of a sum of squares, which is not finite either where an element is not.
    return new, opt_state, jnp.isfinite(jnp.sum(jnp.square(new * 1e-19)))


def _readable(pieces: Pieces) -> tuple[Any, ...]:
    """Pieces that XLA reads where they are: given to a program as they are, they cost no `device_put`."""
    return tuple(aligned(piece) if isinstance(piece, np.ndarray) else piece for piece in pieces)


def _unless_counted(kept: jax.Array, begun: jax.Array) -> jax.Array:
    return kept if jnp.issubdtype(kept.dtype, jnp.integer) else begun


# Kept here and not in each OuterStep, so that all of a process share what one compiled.


@functools.partial(jax.jit, static_argnums=0)
def _begin(config: OuterConfig, piece: jax.Array) -> Any:
    return jax.tree.map(jnp.copy, make_outer_optimizer(config).init(piece))


def _absent(codec: str, anchor: Any) -> tuple[Any, ...]:
    """A contribution of weight 0 to this tensor."""
    return (anchor,) if CODECS[codec].exact else _zeros(codec, tuple(anchor.shape))


@functools.cache
def _zeros(codec: str, shape: Shape) -> tuple[np.ndarray, ...]:
    return tuple(aligned(np.zeros(*part)) for part in CODECS[codec].formats(shape))


@shared
def _measuring(shape: Shape, codec: str, of_parameters: bool) -> jax.stages.Compiled:
    """The program that measures one tensor in an offer."""

    def measure(anchor: jax.Array, arrays: tuple[jax.Array, ...]) -> jax.Array:
        vector = CODECS[codec].values(arrays, math.prod(shape))
        return norm_of(vector, anchor if of_parameters else None)

    tensor, arrays = described(CODECS[codec], shape)
    return jax.jit(measure, keep_unused=True).lower(tensor, arrays).compile()


@shared
def _adding(shape: Shape, codecs: tuple[str, ...], of_parameters: bool, more: bool) -> jax.stages.Compiled:
    """The program that adds up contributions, each times a number, in memory that it is given.

    `more`: to what is in that memory.
    """

    def add(
        total: jax.Array, anchor: jax.Array, encoded: tuple[tuple[jax.Array, ...], ...], scales: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        vectors = _vectors(shape, codecs, encoded)
        sent = Sent(vectors, scales, anchor if of_parameters else None)
        begun = _as_values(total, jax.eval_shape(vectors[0]).shape) if more else None
        made, length = summed(scales, sent, begun)
        return shaped(made, shape), length

    return _of_contributions(add, shape, codecs, 1)


@shared
def _merging(rule: str, shape: Shape, codecs: tuple[str, ...], of_parameters: bool) -> jax.stages.Compiled:
    """The program of a rule that takes all contributions at once, absent ones with weight 0."""

    def merge(
        memory: jax.Array,
        anchor: jax.Array,
        encoded: tuple[tuple[jax.Array, ...], ...],
        weights: jax.Array,
        norms: jax.Array,
    ) -> MergedTensor:
        del memory
        sent = Sent(_vectors(shape, codecs, encoded), weights, anchor if of_parameters else None, norms)
        merged = MERGE_RULES[rule](sent)
        return merged._replace(unscaled=shaped(merged.unscaled, shape))

    return _of_contributions(merge, shape, codecs, 2)


def _of_contributions(
    program: Callable[..., Any], shape: Shape, codecs: tuple[str, ...], numbers: int
) -> jax.stages.Compiled:
    """Compiles a program of memory, Theta, contributions in these codecs, and so many numbers of each."""
    of_codec = {codec: described(CODECS[codec], shape) for codec in codecs}
    tensor, _ = of_codec[codecs[0]]
    each = jax.ShapeDtypeStruct((len(codecs),), jnp.float32, sharding=tensor.sharding)
    encoded = tuple(of_codec[codec][1] for codec in codecs)
    # Without `keep_unused` memory that is only written would be dropped.
    compiled = jax.jit(program, donate_argnums=0, keep_unused=True)
    return compiled.lower(tensor, tensor, encoded, *[each] * numbers).compile()


def _vectors(
    shape: Shape, codecs: tuple[str, ...], encoded: tuple[tuple[jax.Array, ...], ...]
) -> list[Callable[[], jax.Array]]:
    """Decodes each contribution where it is used."""
    alike = len(set(codecs)) == 1

    def values(codec: str, arrays: tuple[jax.Array, ...]) -> jax.Array:
        # With the barrier every pass decodes anew: XLA stores what several passes share.
        arrays = jax.lax.optimization_barrier(arrays)
        # In the codec's own shape, which is twice as fast; in the tensor's where codecs and so shapes differ.
        if alike:
            return CODECS[codec].values(arrays, math.prod(shape))
        return CODECS[codec].decode(arrays, shape)

    return [functools.partial(values, *each) for each in zip(codecs, encoded, strict=True)]


def _as_values(array: jax.Array, shape: Shape) -> jax.Array:
    """A tensor in the shape of `Codec.values`: zeros follow its elements."""
    flat = array.reshape(-1)
    return jnp.pad(flat, (0, math.prod(shape) - flat.size)).reshape(shape)


@shared
def _stepping(config: OuterConfig, shape: Shape) -> jax.stages.Compiled:
    """The program of the outer optimizer's step, in the memory of the merged outer gradient."""

    def step(
        unscaled: jax.Array, opt_state: Any, theta: jax.Array, scale: jax.Array
    ) -> tuple[jax.Array, Any, jax.Array]:
        return step_tensor(config, unscaled, scale, theta, opt_state)

    sharding = jax.sharding.SingleDeviceSharding(host_device())
    tensor, scale = (jax.ShapeDtypeStruct(each, jnp.float32, sharding=sharding) for each in (shape, ()))
    state = jax.eval_shape(functools.partial(_begin, config), tensor)
    return jax.jit(step, donate_argnums=(0, 1)).lower(tensor, state, tensor, scale).compile()


def _metrics(merged: Sequence[MergedTensor], weights: np.ndarray, kinds: Sequence[str]) -> dict[str, float]:
    """Those of a fragment, as of `OuterResult`, from those of its tensors, which are of these kinds."""
    lengths, norms, cosines = (
        np.array([getattr(m, name) for m in merged], np.float64) for name in ("length", "norms", "cosine")
    )
    squares = np.square(norms)  # (pieces, M)
    importance = squares @ weights

    def mean_cosine(here: np.ndarray) -> float:
        total = importance[here].sum()
        return float(cosines[here] @ importance[here] / total) if total > 0 else 1.0

    by_kind = {f"cosine/{kind}": mean_cosine(np.array(kinds) == kind) for kind in sorted(set(kinds))}
    return {
        "outer_gradient_norm": float(np.linalg.norm(lengths)),
        "learner_delta_norm": float(np.sqrt(squares.sum(0)) @ weights),
        "cosine": mean_cosine(np.ones(len(kinds), bool)),
        **by_kind,
    }
