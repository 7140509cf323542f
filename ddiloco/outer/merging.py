"""Weights and merge rules: one outer gradient out of those of many learners (paper, steps 5 to 7).

A rule is a pure function for use under jit,

    rule(vectors, weights, anchor=None) -> Merged

Args:
  vectors: the outer gradients v_m of M learners, each an array of the tensor's shape. Or, with `anchor`, the
    learners' parameters theta_m; then v_m = anchor - theta_m is computed where it is used and never stored.
  weights: (M,), not negative; only their ratios count. An absent learner has weight 0, and its array may
    hold anything finite.
  anchor: Theta as it was before the round, of the tensor's shape; None: `vectors` are outer gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Below this norm of the mean of unit vectors the learners agree on no direction. A smaller bound would
# be no better: rounding of float32 enters the direction divided by this norm.
DEGENERATE = 1e-3


def contribution_weight(c_steps: int, c_tokens: int) -> float:
    """How much a learner's contribution counts: its tokens times its tokens a step.

      w_m = c_tokens * (c_tokens / c_steps),  0 without a step or a token.

    Args:
      c_steps: inner steps since the learner last received the fragment.
      c_tokens: tokens that these steps trained on.

    Raises:
      ValueError: a negative count.

    Example:
      >>> contribution_weight(c_steps=10, c_tokens=1000), contribution_weight(c_steps=5, c_tokens=1000)
      (100000.0, 200000.0)
    """
    if c_steps < 0 or c_tokens < 0:
        raise ValueError(f"c_steps is {c_steps} and c_tokens is {c_tokens}, but counts are not negative")
    return c_tokens * (c_tokens / c_steps) if c_steps else 0.0


def normalised(weights: Iterable[float]) -> np.ndarray:
    """The weights divided by their sum, (M,) float32; all zero if they all are.

    Raises:
      ValueError: a negative weight or one that is not finite.

    Example:
      >>> print(normalised([1, 3, 0]))
      [0.25 0.75 0.  ]
    """
    exact = np.asarray(list(weights), np.float64)
    if not np.all(np.isfinite(exact) & (exact >= 0)):
        raise ValueError(f"weights are {exact.tolist()}, but must be finite and not negative")
    total = exact.sum()
    return (exact / total if total > 0 else exact).astype(np.float32)


class Merged(NamedTuple):
    """What a rule returns; under jit, what the caller does not use costs nothing.

    Attributes:
      value: the merged outer gradient, float32, of the vectors' shape.
      length: its norm.
      norms: (M,) norms of the vectors, 0 for absent learners.
      cosine: weighted mean of the cosines between different learners' vectors, 1 if there are fewer than
        two. That of `direct` is off by about 1e-7 times the ratio of the largest norm to the others.
    """

    value: jax.Array
    length: jax.Array
    norms: jax.Array
    cosine: jax.Array


MergeRule = Callable[..., Merged]


def direct(vectors: Sequence[jax.Array], weights: jax.Array, anchor: jax.Array | None = None) -> Merged:
    """The weighted average of the vectors; zero if all weights are zero. Arguments as above.

      value = sum_m w_m v_m / sum_m w_m

    Example:
      >>> import jax.numpy as jnp
      >>> vectors = [jnp.array([4.0, 0.0]), jnp.array([0.0, 1.0])]
      >>> print(direct(vectors, jnp.array([3.0, 1.0])).value)
      [3.   0.25]
    """
    shares = _shares(weights)
    norms = _norms(vectors, shares, anchor)
    value = _combine(shares, vectors, anchor)
    length = _norm(value)
    return Merged(value, length, norms, _mean_cosine(shares * norms, length))


def rda(vectors: Sequence[jax.Array], weights: jax.Array, anchor: jax.Array | None = None) -> Merged:
    """Radial-Directional Averaging: the mean length along the mean direction. Arguments as above.

      value = mean_m |v_m| * phi(mean_m phi(v_m)),  phi(x) = x / |x|,  means weighted by w_m

    If every |v_m| is R, the result has norm R, however many learners there are and however little they agree.
    A zero vector counts in the mean length, since its learner did not want to move, but it has no direction.
    Where the mean direction is shorter than `DEGENERATE`, the learners agree on none, and the value is the
    direct average.

    The relative error is about 1e-7 over the length of the mean direction. Norms must lie between 1e-18 and
    1e19, so that their squares are float32 numbers.

    Example:
      >>> import jax.numpy as jnp
      >>> vectors = [jnp.array([4.0, 0.0]), jnp.array([0.0, 4.0])]
      >>> weights = jnp.array([1.0, 1.0])
      >>> print(f"{rda(vectors, weights).length:.4f} {direct(vectors, weights).length:.4f}")
      4.0000 2.8284
    """
    shares = _shares(weights)
    norms = _norms(vectors, shares, anchor)
    pointing = jnp.where(norms > 0, shares, 0)
    scales = jnp.where(norms > 0, shares / jnp.where(norms > 0, norms, 1), 0)
    mean = _combine(scales, vectors, anchor)
    agreement = _norm(mean)
    degenerate = ~(agreement > DEGENERATE * pointing.sum())

    def average() -> tuple[jax.Array, jax.Array]:
        value = _combine(shares, vectors, anchor)
        return value, _norm(value)

    value, length = jax.lax.cond(degenerate, average, lambda: (mean, agreement))
    scale = jnp.where(degenerate, 1, jnp.dot(shares, norms) / agreement)
    return Merged(value * scale, length * scale, norms, _mean_cosine(pointing, agreement))


MERGE_RULES: dict[str, MergeRule] = {"direct": direct, "rda": rda}


def _shares(weights: jax.Array) -> jax.Array:
    total = jnp.sum(weights)
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), 0).astype(jnp.float32)


def _difference(vector: jax.Array, anchor: jax.Array | None) -> jax.Array:
    vector = vector.astype(jnp.float32)
    return vector if anchor is None else anchor.astype(jnp.float32) - vector


def _norm(array: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(array)))  # a tree of partial sums in XLA, also on CPU


def _norms(vectors: Sequence[jax.Array], shares: jax.Array, anchor: jax.Array | None) -> jax.Array:
    norms = jnp.stack([_norm(_difference(vector, anchor)) for vector in vectors])
    return jnp.where(shares > 0, norms, 0)  # an absent learner's norm may have overflowed


def _combine(scales: jax.Array, vectors: Sequence[jax.Array], anchor: jax.Array | None) -> jax.Array:
    # Two passes over the vectors, norms and then this one, are the least. Without the barriers XLA shares the
    # differences between the two and stores them all, and fuses this sum into its norm and its other uses,
    # reading all vectors again for each.
    scales, anchor = jax.lax.optimization_barrier((scales, anchor))
    total = sum(scales[m] * _difference(vector, anchor) for m, vector in enumerate(vectors))
    combined: jax.Array = jax.lax.optimization_barrier(total)
    return combined


def _mean_cosine(lengths: jax.Array, length_of_sum: jax.Array) -> jax.Array:
    """The mean cosine of vectors of these lengths, weighted by their products, from the length of their sum.

    |sum a_i|^2 = sum |a_i|^2 + sum over i != j of |a_i| |a_j| cos_ij.
    """
    own = jnp.sum(jnp.square(lengths))
    pairs = jnp.square(jnp.sum(lengths)) - own
    # One learner alone leaves pairs = 0 but for rounding.
    several = pairs > 1e-6 * own
    return jnp.where(several, (jnp.square(length_of_sum) - own) / jnp.where(several, pairs, 1), 1)
