"""One outer step of one fragment: its tensors merged, the outer optimizer's step, and metrics."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ddiloco.arrays.host_memory import aligned, owned
from ddiloco.outer.encoding import DifferenceEncoder
from ddiloco.outer.fragments import FragmentLayout, is_embedding
from ddiloco.outer.merging import MERGE_RULES, Sent, normalised, norms_of
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
    """Makes the next version of a fragment from the learners' parameters; its only state is compiled code.

    Each tensor is merged and stepped by programs of its own, with an outer optimizer of its own. Tensors of
    the same shape share them: a model has few shapes, and its fragments many tensors. All take `num_learners`
    contributions, absent ones with weight 0, so that a changing quorum compiles nothing.
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
        self._device = jax.local_devices(backend="cpu")[0]  # whatever the default backend
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
        if self._encode is not None:
            self._encode.compile(p)

    def norms(self, p: int, pieces: Pieces, contributions: Sequence[Pieces]) -> np.ndarray:
        """Norms of the outer gradients, (pieces, M) float32, those of absent learners 0; for `__call__`.

        Raises:
          ValueError: there are more contributions than M.
        """
        return self._norms(p, *self._slots(pieces, contributions))

    def __call__(
        self,
        p: int,
        pieces: Pieces,
        opt_state: Any,
        contributions: Sequence[Pieces],
        weights: Sequence[float],
        spare: Pieces | None = None,
        norms: np.ndarray | None = None,
    ) -> OuterResult:
        """Merges one round of fragment p, and waits for the result.

        Args:
          pieces: Theta_p, float32, numpy or on the CPU device; never written.
          opt_state: the optimizer's state, whose memory the new one takes: do not use it again.
          contributions: of up to M learners, each like `pieces`; never written.
          weights: one for each contribution, not negative; only their ratios count.
          spare: jax arrays like `pieces` that nobody needs any more, whose memory the result takes. Where
            a numpy view of one is still alive, the result takes new memory instead.
          norms: what `norms` returned for these contributions, so that they are not read for it again.

        Raises:
          ValueError: there are more contributions than M.
        """
        anchor, slots = self._slots(pieces, contributions)
        if norms is None:
            norms = self._norms(p, anchor, slots)
        shares = normalised([*weights, *[0.0] * (self._num_learners - len(contributions))])
        spare = self._zeros(anchor) if spare is None else tuple(spare)
        opt_state, left_out = (opt_state, ()) if self._encode is None else opt_state
        of_tensors = zip(self._of_tensors(p), spare, opt_state, anchor, slots, norms, strict=True)
        stepped = [step(*arrays, vectors, shares, own) for (_, step), *arrays, vectors, own in of_tensors]
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

    def _slots(self, pieces: Pieces, contributions: Sequence[Pieces]) -> tuple[Pieces, list[Pieces]]:
        """Theta_p, and of each of its tensors M contributions, those of absent learners Theta_p's own."""
        absent = self._num_learners - len(contributions)
        if absent < 0:
            raise ValueError(f"there are {len(contributions)} contributions, more than {self._num_learners}")
        anchor = _readable(pieces)
        return anchor, list(zip(*map(_readable, contributions), *[anchor] * absent, strict=True))

    def _norms(self, p: int, anchor: Pieces, slots: Sequence[Pieces]) -> np.ndarray:
        by_tensor = zip(self._of_tensors(p), anchor, slots, strict=True)
        return np.stack([np.asarray(measure(theta, vectors)) for (measure, _), theta, vectors in by_tensor])

    def _zeros(self, pieces: Pieces) -> tuple[jax.Array, ...]:
        return tuple(owned(np.zeros(piece.shape, np.float32), self._device) for piece in pieces)

    def _of_tensors(self, p: int) -> Iterator[tuple[jax.stages.Compiled, jax.stages.Compiled]]:
        """For each tensor of fragment p the programs that measure it, and merge and step it."""
        on_cpu = jax.sharding.SingleDeviceSharding(self._device)
        for piece, shape in zip(self._layout.fragments[p], self._layout.piece_shapes(p), strict=True):
            kind = _float32(shape, on_cpu), self._num_learners, self._of_parameters
            yield _measuring(*kind), _stepping(self._config, rule_of(self._config, piece.name), *kind)


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
    updates, opt_state = make_outer_optimizer(config).update(merged.value, opt_state, theta)
    new = optax.apply_updates(theta, updates)
    # Of a sum of squares, which is not finite either where an element is not.
    finite = jnp.isfinite(jnp.sum(jnp.square(new * 1e-19)))
    return new, opt_state, Measured(merged.length, merged.norms, merged.cosine, finite)


def _float32(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def _readable(pieces: Pieces) -> tuple[np.ndarray | jax.Array, ...]:
    """Pieces that XLA reads where they are: given to a program as they are, they cost no `device_put`."""
    return tuple(aligned(piece) if isinstance(piece, np.ndarray) else piece for piece in pieces)


def _unless_counted(kept: jax.Array, begun: jax.Array) -> jax.Array:
    return kept if jnp.issubdtype(kept.dtype, jnp.integer) else begun


# Kept here and not in each OuterStep, so that all of a process share what one compiled.


@functools.partial(jax.jit, static_argnums=0)
def _begin(config: OuterConfig, piece: jax.Array) -> Any:
    return jax.tree.map(jnp.copy, make_outer_optimizer(config).init(piece))


@functools.cache
def _measuring(tensor: jax.ShapeDtypeStruct, count: int, of_parameters: bool) -> jax.stages.Compiled:
    def measure(anchor: jax.Array, vectors: tuple[jax.Array, ...]) -> jax.Array:
        return norms_of(vectors, anchor if of_parameters else None)

    return jax.jit(measure, keep_unused=True).lower(tensor, (tensor,) * count).compile()


@functools.cache
def _stepping(
    config: OuterConfig, rule: str, tensor: jax.ShapeDtypeStruct, count: int, of_parameters: bool
) -> jax.stages.Compiled:
    def step(
        spare: jax.Array,
        opt_state: Any,
        anchor: jax.Array,
        vectors: tuple[jax.Array, ...],
        weights: jax.Array,
        norms: jax.Array,
    ) -> tuple[jax.Array, Any, Measured]:
        del spare
        sent = Sent(vectors, weights, anchor if of_parameters else None, norms)
        return step_tensor(config, rule, anchor, opt_state, sent)

    state = jax.eval_shape(functools.partial(_begin, config), tensor)
    numbers = _float32((count,), tensor.sharding)
    # Without `keep_unused`, `spare` would be dropped.
    compiled = jax.jit(step, donate_argnums=(0, 1), keep_unused=True)
    return compiled.lower(tensor, state, tensor, (tensor,) * count, numbers, numbers).compile()


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
