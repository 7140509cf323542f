"""One outer step of one fragment: merge, outer optimizer and metrics as a single compiled function."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
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
    opt_state: Any  # the outer optimizer's new state, beside what the update codec left out, if it is not f32
    # `outer_gradient_norm`, of the merged outer gradient; `learner_delta_norm`, the weighted mean of the
    # norms of the learners' own; `cosine`, the mean between those of different learners, 1 for one learner
    metrics: dict[str, float]
    finite: bool = True  # whether every element of the pieces is
    # What leads from the last pieces to these, in the update codec; () where that is f32
    difference: tuple[np.ndarray, ...] = ()


class OuterStep:
    """Makes the next version of a fragment from the learners' parameters; its only state is compiled code.

    Fragments of equal shapes share one executable. It always takes `num_learners` contributions, those of
    absent learners with weight 0, so that a changing quorum never compiles anything.
    """

    def __init__(self, layout: FragmentLayout, config: OuterConfig, num_learners: int) -> None:
        """Compiles nothing yet. `num_learners`: M, the most contributions that a round can have."""
        self._layout = layout
        self._config = config
        self._num_learners = num_learners
        self._device = jax.local_devices(backend="cpu")[0]  # whatever the default backend
        lossy = config.update_codec != "f32"
        self._encode = DifferenceEncoder(layout, config.update_codec) if lossy else None
        self._measuring = functools.cache(self._compiled_measure)
        self._stepping = functools.cache(self._compiled)

    def init(self, pieces: Pieces) -> Any:
        """The outer optimizer's state before the first round of a fragment with these pieces."""
        with jax.default_device(self._device):
            state = _begin(self._config, _readable(pieces))
            return state if self._encode is None else (state, self._zeros(pieces))

    def compile(self, p: int) -> None:
        """Compiles the step of fragment p, unless one of the same shapes has been compiled."""
        self._measure(p)
        self._executable(p)
        if self._encode is not None:
            self._encode.compile(p)

    def norms(self, p: int, pieces: Pieces, contributions: Sequence[Pieces]) -> np.ndarray:
        """Norms of the outer gradients, (pieces, M) float32, those of absent learners 0; for `__call__`.

        Raises:
          ValueError: there are more contributions than M.
        """
        anchor, slots = self._slots(pieces, contributions)
        return np.asarray(self._measure(p)(anchor, slots))

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
          contributions: theta_{m,p} of up to M learners, each like `pieces`; never written.
          weights: one for each contribution, not negative; only their ratios count.
          spare: jax arrays like `pieces` that nobody needs any more, whose memory the result takes. Where
            a numpy view of one is still alive, the result takes new memory instead.
          norms: what `norms` returned for these contributions, so that they are not read for it again.

        Raises:
          ValueError: there are more contributions than M.
        """
        anchor, slots = self._slots(pieces, contributions)
        if norms is None:
            norms = self._measure(p)(anchor, slots)
        shares = normalised([*weights, *[0.0] * (self._num_learners - len(contributions))])
        spare = self._zeros(anchor) if spare is None else tuple(spare)
        opt_state, left_out = (opt_state, ()) if self._encode is None else opt_state
        results = self._executable(p)(spare, opt_state, anchor, slots, shares, norms)
        new, opt_state, metrics = jax.block_until_ready(results)
        values = {name: float(value) for name, value in metrics.items()}
        finite = bool(values.pop("finite"))
        if not finite:  # nothing is taken, and moments begin again; what counts rounds goes on
            opt_state = jax.tree.map(_unless_counted, opt_state, _begin(self._config, anchor))
            return OuterResult(
                new, opt_state if self._encode is None else (opt_state, left_out), values, False
            )
        if self._encode is None:
            return OuterResult(new, opt_state, values)
        encoded = self._encode(p, anchor, new, left_out)
        return OuterResult(encoded.pieces, (opt_state, encoded.left_out), values, difference=encoded.arrays)

    def _slots(self, pieces: Pieces, contributions: Sequence[Pieces]) -> tuple[Pieces, tuple[Pieces, ...]]:
        """Theta_p, and M contributions of which those of absent learners are Theta_p."""
        absent = self._num_learners - len(contributions)
        if absent < 0:
            raise ValueError(f"there are {len(contributions)} contributions, more than {self._num_learners}")
        anchor = _readable(pieces)
        return anchor, (*map(_readable, contributions), *[anchor] * absent)

    def _zeros(self, pieces: Pieces) -> tuple[jax.Array, ...]:
        return tuple(owned(np.zeros(piece.shape, np.float32), self._device) for piece in pieces)

    def _measure(self, p: int) -> jax.stages.Compiled:
        return self._measuring(self._layout.piece_shapes(p))

    def _executable(self, p: int) -> jax.stages.Compiled:
        merge = self._config.merge
        of_embeddings = self._config.embeddings if merge == "rda" else merge
        rules = tuple(
            of_embeddings if is_embedding(piece.name) else merge for piece in self._layout.fragments[p]
        )
        return self._stepping(rules, self._layout.piece_shapes(p))

    def _described(self, *shapes: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
        sharding = jax.sharding.SingleDeviceSharding(self._device)
        return tuple(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for shape in shapes)

    def _compiled_measure(self, shapes: tuple[tuple[int, ...], ...]) -> jax.stages.Compiled:
        pieces = self._described(*shapes)
        return _norms_by_piece.lower(pieces, (pieces,) * self._num_learners).compile()

    def _compiled(self, rules: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> jax.stages.Compiled:
        pieces, count = self._described(*shapes), self._num_learners
        state = jax.eval_shape(functools.partial(_begin, self._config), pieces)
        weights, norms = self._described((count,), (len(shapes), count))
        given = pieces, state, pieces, (pieces,) * count, weights, norms
        return _step.lower(self._config, rules, *given).compile()


def _readable(pieces: Pieces) -> tuple[np.ndarray | jax.Array, ...]:
    """Pieces that XLA reads where they are: given to a program as they are, they cost no `device_put`."""
    return tuple(aligned(piece) if isinstance(piece, np.ndarray) else piece for piece in pieces)


def _unless_counted(kept: jax.Array, begun: jax.Array) -> jax.Array:
    return kept if jnp.issubdtype(kept.dtype, jnp.integer) else begun


# Jitted here and not in each OuterStep, so that JAX traces and compiles them once for all of a process.


@functools.partial(jax.jit, static_argnums=0)
def _begin(config: OuterConfig, pieces: tuple[jax.Array, ...]) -> Any:
    return jax.tree.map(jnp.copy, make_outer_optimizer(config).init(pieces))


@jax.jit
def _norms_by_piece(
    anchor: tuple[jax.Array, ...], contributions: tuple[tuple[jax.Array, ...], ...]
) -> jax.Array:
    by_piece = zip(anchor, *contributions, strict=True)
    return jnp.stack([norms_of(vectors, piece) for piece, *vectors in by_piece])


# Without `keep_unused`, `spare` would be dropped.
@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3), keep_unused=True)
def _step(
    config: OuterConfig,
    rules: tuple[str, ...],
    spare: tuple[jax.Array, ...],
    opt_state: Any,
    anchor: tuple[jax.Array, ...],
    contributions: tuple[tuple[jax.Array, ...], ...],
    weights: jax.Array,
    norms: jax.Array,
) -> tuple[tuple[jax.Array, ...], Any, Mapping[str, jax.Array]]:
    del spare
    merged = [
        MERGE_RULES[rule](Sent(vectors, weights, piece, own))
        for rule, own, piece, *vectors in zip(rules, norms, anchor, *contributions, strict=True)
    ]
    optimizer = make_outer_optimizer(config)
    updates, opt_state = optimizer.update(tuple(m.value for m in merged), opt_state, anchor)
    squares = jnp.stack([jnp.square(m.norms) for m in merged])  # (pieces, M)
    importance = squares @ weights
    cosines = jnp.stack([m.cosine for m in merged])
    total = importance.sum()
    metrics = {
        "outer_gradient_norm": jnp.sqrt(sum(jnp.square(m.length) for m in merged)),
        "learner_delta_norm": jnp.dot(jnp.sqrt(squares.sum(0)), weights),
        "cosine": jnp.where(total > 0, jnp.dot(cosines, importance) / jnp.where(total > 0, total, 1), 1),
    }
    new = optax.apply_updates(anchor, updates)
    # Of a sum of squares, which is not finite either where an element is not.
    metrics["finite"] = jnp.isfinite(sum(jnp.sum(jnp.square(piece * 1e-19)) for piece in new))
    return new, opt_state, metrics
