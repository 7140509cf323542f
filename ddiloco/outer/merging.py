"""Weights and merge rules: one outer gradient out of those of many learners (paper, steps 5 to 7).

A rule is a pure function of what learners have `Sent`, for use under jit. `direct` and `rda` are the paper's.
The others bound what one learner can do to the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Below this norm of the mean of unit vectors the learners agree on no direction. A smaller bound would
# be no better: rounding of float32 enters the direction divided by this norm.
DEGENERATE = 1e-3
_WEISZFELD = 100  # iterations, of M numbers each


def contribution_weight(c_steps: int, c_tokens: int, interval: int | None = None) -> float:
    """Weight of a learner's contribution: its tokens times its tokens a step.

      w_m = c_tokens * (c_tokens / c_steps),  0 without a step or a token.

    With `interval` H, steps beyond H add no weight, w_m * min(1, H / c_steps): they were taken further and
    further from what others merged meanwhile. The paper has no such case (docs/results/merged_share.md).

    Args:
      c_steps: inner steps since the learner last received the fragment, or that are not merged yet.
      c_tokens: tokens that these steps trained on.
      interval: H; None: any number of steps counts.

    Raises:
      ValueError: a negative count.

    Example:
      >>> contribution_weight(c_steps=10, c_tokens=1000), contribution_weight(c_steps=5, c_tokens=1000)
      (100000.0, 200000.0)
    """
    if c_steps < 0 or c_tokens < 0:
        raise ValueError(f"c_steps is {c_steps} and c_tokens is {c_tokens}, but counts are not negative")
    weight = c_tokens * (c_tokens / c_steps) if c_steps else 0.0
    return weight if interval is None or c_steps <= interval else weight * interval / c_steps


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


Vector = jax.Array | Callable[[], jax.Array]
Numbers = Any  # float32, (M,) or one; numpy's or jax's, and functions of them make the same kind


class Sent(NamedTuple):
    """The contributions of M learners to one tensor."""

    # The outer gradients v_m, each an array of the tensor's shape. Or, with `anchor`, the learners'
    # parameters theta_m; then v_m = anchor - theta_m is computed where it is used and never stored. So is one
    # that is given as a function, which is called for each pass over it.
    vectors: Sequence[Vector]
    # (M,), not negative; only their ratios count. An absent learner has weight 0, and its array may hold
    # anything finite.
    weights: jax.Array
    anchor: jax.Array | None = None  # Theta as it was before the round; None: `vectors` are outer gradients
    norms: jax.Array | None = None  # (M,), what `norm_of` gives of each; None: to be computed


def norm_of(vector: Vector, anchor: jax.Array | None = None) -> jax.Array:
    """The norm of an outer gradient; arguments as in `Sent`."""
    return _norm(_difference(vector, anchor))


def summed(scales: jax.Array, sent: Sent, begun: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """The sum of the outer gradients, each times a number, and its norm; for use under jit.

    `begun`: what the sum begins with, float32, where others are in it already; None: zero.
    """
    # Two passes over the vectors, norms and then this one, are the least. Without the barriers XLA shares the
    # differences between the two and stores them all, and fuses this sum into its norm and its other uses,
    # reading all vectors again for each.
    scales, anchor = jax.lax.optimization_barrier((scales, sent.anchor))
    total = sum(scales[m] * _difference(vector, anchor) for m, vector in enumerate(sent.vectors))
    made: jax.Array = jax.lax.optimization_barrier(total if begun is None else begun + total)
    return made, _norm(made)


class MergedTensor(NamedTuple):
    """The result of a merge rule; under jit, unused fields cost nothing."""

    unscaled: jax.Array  # the merged outer gradient over `scale`, float32, of the vectors' shape
    length: Numbers  # the norm of the merged outer gradient
    norms: Numbers  # (M,) norms of the vectors, 0 for absent learners
    # Weighted mean of the cosines between different learners' vectors, 1 if there are fewer than two. That of
    # `direct` is off by about 1e-7 times the ratio of the largest norm to the others.
    cosine: Numbers
    # Apart from the value: its users can multiply as they read it, and a product would be another pass.
    scale: Numbers = 1.0

    @property
    def value(self) -> jax.Array:
        """The merged outer gradient."""
        value: jax.Array = self.unscaled * self.scale
        return value


MergeRule = Callable[[Sent], MergedTensor]


class Mix(NamedTuple):
    """A rule whose value is a sum of the vectors, each times a number, and then times one more number.

    The numbers depend on weights and norms alone, so that the sum can be made in any number of passes.
    """

    scales: Callable[[Numbers, Numbers], Numbers]  # of shares and norms, by vector
    scale: Callable[[Numbers, Numbers, Numbers], Numbers]  # of shares, norms and the sum's length
    # Below this share of the lengths in it, the sum is too short: the value is the direct average
    shortest: float | None = None

    def is_short(self, scales: Numbers, norms: Numbers, length: Numbers) -> Numbers:
        """Whether the sum of this length is too short."""
        if self.shortest is None:
            return False
        return ~(length > self.shortest * (scales * norms).sum())

    def merged(
        self, total: jax.Array, length: Numbers, shares: Numbers, norms: Numbers, scales: Numbers
    ) -> MergedTensor:
        """The result from the sum and its length."""
        scale = self.scale(shares, norms, length)
        return MergedTensor(total, length * scale, norms, _mean_cosine(scales * norms, length), scale)

    def __call__(self, sent: Sent) -> MergedTensor:
        """The whole rule, for use under jit."""
        shares, norms = _counted(sent)
        scales = self.scales(shares, norms)
        total, length = summed(scales, sent)
        merged = self.merged(total, length, shares, norms, scales)
        if self.shortest is None:
            return merged

        def average() -> MergedTensor:
            return DIRECT.merged(*summed(shares, sent), shares, norms, shares)

        chosen: MergedTensor = jax.lax.cond(self.is_short(scales, norms, length), average, lambda: merged)
        return chosen


def _inverse(norms: Numbers) -> Numbers:
    """Of each norm, 0 where it is 0."""
    return (norms > 0) / (norms + (norms == 0))


def _as_long_as_the_median(shares: Numbers, norms: Numbers) -> Numbers:
    order = norms.argsort()
    below = shares[order].cumsum()
    longest = norms[order][(below >= 0.5 * below[-1]).argmax()]
    xp = norms.__array_namespace__()
    return xp.where(norms > longest, longest * _inverse(norms), 1) * shares


def _one(shares: Numbers, norms: Numbers, length: Numbers) -> Numbers:
    return norms.dtype.type(1)


DIRECT = Mix(lambda shares, norms: shares, _one)
RDA = Mix(
    lambda shares, norms: shares * _inverse(norms),
    lambda shares, norms, length: (shares * norms).sum() * _inverse(length),
    DEGENERATE,
)
CLIPPED = Mix(_as_long_as_the_median, _one)


def direct(sent: Sent) -> MergedTensor:
    """The weighted average of the vectors; zero if all weights are zero.

      value = sum_m w_m v_m / sum_m w_m

    Example:
      >>> import jax.numpy as jnp
      >>> vectors = [jnp.array([4.0, 0.0]), jnp.array([0.0, 1.0])]
      >>> print(direct(Sent(vectors, jnp.array([3.0, 1.0]))).value)
      [3.   0.25]
    """
    return DIRECT(sent)


def rda(sent: Sent) -> MergedTensor:
    """Radial-Directional Averaging: the mean length along the mean direction.

      value = mean_m |v_m| * phi(mean_m phi(v_m)),  phi(x) = x / |x|,  means weighted by w_m

    If every |v_m| is R, the result has norm R, however many learners there are and however little they agree.
    A zero vector counts in the mean length, since its learner did not want to move, but it has no direction.
    Where the mean direction is shorter than `DEGENERATE`, the learners agree on none, and the value is the
    direct average.

    The relative error is about 1e-7 over the length of the mean direction. Norms must lie between 1e-18 and
    1e19, so that their squares are float32 numbers.

    Example:
      >>> import jax.numpy as jnp
      >>> sent = Sent([jnp.array([4.0, 0.0]), jnp.array([0.0, 4.0])], jnp.array([1.0, 1.0]))
      >>> print(f"{rda(sent).length:.4f} {direct(sent).length:.4f}")
      4.0000 2.8284
    """
    return RDA(sent)


def clipped(sent: Sent) -> MergedTensor:
    """The weighted average of vectors that are no longer than their median.

      value = mean_m min(1, R / |v_m|) v_m,  R the median of the norms of those that count, weighted by w_m

    Example:
      >>> import jax.numpy as jnp
      >>> vectors = [jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0]), jnp.array([3e6, 0.0])]
      >>> print(3 * clipped(Sent(vectors, jnp.ones(3))).value)
      [2. 1.]
    """
    return CLIPPED(sent)


def trimmed(sent: Sent) -> MergedTensor:
    """The mean, element by element, without the largest and the smallest quarter.

    Of n learners with a weight, ceil(n/4) are left out at each end, at most (n-1)/2; the others count alike.

    Example:
      >>> import jax.numpy as jnp
      >>> vectors = [jnp.array([1.0]), jnp.array([2.0]), jnp.array([1e6]), jnp.array([3.0])]
      >>> print(trimmed(Sent(vectors, jnp.ones(4))).value)
      [2.5]
    """
    shares, norms = _counted(sent)
    here = shares > 0
    count = here.sum()
    cut = jnp.maximum(jnp.minimum((count + 3) // 4, (count - 1) // 2), 0)
    ranked = _sorted(
        [jnp.where(here[m], _difference(x, sent.anchor), jnp.inf) for m, x in enumerate(sent.vectors)]
    )
    kept = [jnp.where((cut <= r) & (r < count - cut), x, 0) for r, x in enumerate(ranked)]
    value: jax.Array = jax.lax.optimization_barrier(sum(kept) / jnp.maximum(count - 2 * cut, 1))
    _, average = summed(shares, sent)
    return MergedTensor(value, _norm(value), norms, _mean_cosine(shares * norms, average))


def geometric_median(sent: Sent) -> MergedTensor:
    """The point with the least weighted sum of distances to the vectors.

      value = argmin_v sum_m w_m |v - v_m|

    By Weiszfeld's iteration on the M^2 inner products, for which the vectors are read M/2 times; where
    vectors coincide with the result, distances are taken as at least 1e-6 of the median norm.

    Example:
      >>> import jax.numpy as jnp
      >>> vectors = [jnp.array([0.0]), jnp.array([1.0]), jnp.array([1e6])]
      >>> print(geometric_median(Sent(vectors, jnp.ones(3))).value.round(3))
      [1.]
    """
    shares, norms = _counted(sent)
    # Of vectors of about one length, since float32 would lose the short ones beside the square of a long one.
    unit = jnp.where(norms > 0, norms, 1)
    directions = _cosines(sent, unit, shares)
    gram = directions * norms[:, None] * norms[None, :]
    middle = jnp.sort(jnp.where(shares > 0, norms, jnp.inf))[(jnp.maximum((shares > 0).sum(), 1) - 1) // 2]
    least = jnp.where(jnp.isfinite(middle) & (middle > 0), 1e-6 * middle, 1.0)

    def closer(_: int, mix: jax.Array) -> jax.Array:
        to_all = jnp.diag(gram) - 2 * gram @ mix + mix @ gram @ mix
        pull = shares / jnp.maximum(jnp.sqrt(jnp.maximum(to_all, 0)), least)
        return pull / jnp.where(pull.sum() > 0, pull.sum(), 1)

    closest = jnp.where(norms <= middle, shares, 0)
    start = closest / jnp.where(closest.sum() > 0, closest.sum(), 1)
    mix = jax.lax.fori_loop(0, _WEISZFELD, closer, start)
    return DIRECT.merged(*summed(mix, sent), shares, norms, mix)


MERGE_RULES: dict[str, MergeRule] = {
    "direct": direct,
    "rda": rda,
    "clipped": clipped,
    "trimmed": trimmed,
    "geometric_median": geometric_median,
}
MIXES = {"direct": DIRECT, "rda": RDA, "clipped": CLIPPED}


def _counted(sent: Sent) -> tuple[jax.Array, jax.Array]:
    """Each learner's share of the weights, and the norm of its vector, 0 of absent learners."""
    weights, total = sent.weights, jnp.sum(sent.weights)
    shares = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), 0).astype(jnp.float32)
    norms = sent.norms
    if norms is None:
        norms = jnp.stack([norm_of(vector, sent.anchor) for vector in sent.vectors])
    return shares, jnp.where(shares > 0, norms, 0)  # an absent learner's norm may have overflowed


def _difference(vector: Vector, anchor: jax.Array | None) -> jax.Array:
    array = (vector() if callable(vector) else vector).astype(jnp.float32)
    return array if anchor is None else anchor.astype(jnp.float32) - array


def _norm(array: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(array)))  # a tree of partial sums in XLA, also on CPU


def _mean_cosine(lengths: Numbers, length_of_sum: Numbers) -> Numbers:
    """The mean cosine of vectors of these lengths, weighted by their products, from the length of their sum.

    |sum a_i|^2 = sum |a_i|^2 + sum over i != j of |a_i| |a_j| cos_ij.
    """
    own = (lengths * lengths).sum()
    pairs = lengths.sum() ** 2 - own
    # One learner alone leaves pairs = 0 but for rounding.
    several = pairs > 1e-6 * own
    where = lengths.__array_namespace__().where
    return where(several, (length_of_sum**2 - own) / where(several, pairs, 1), 1)


def _sorted(columns: list[jax.Array]) -> list[jax.Array]:
    """The arrays with their elements in order, by exchanges alone: XLA makes one loop of them all."""
    ranked = list(columns)
    for end in range(len(ranked) - 1, 0, -1):
        for i in range(end):
            low, high = jnp.minimum(ranked[i], ranked[i + 1]), jnp.maximum(ranked[i], ranked[i + 1])
            ranked[i], ranked[i + 1] = low, high
    return ranked


def _cosines(sent: Sent, units: jax.Array, shares: jax.Array) -> jax.Array:
    """(M, M) inner products of the vectors, each divided by its unit; 0 for absent learners."""
    count = len(sent.vectors)
    rows = [[jnp.zeros((), jnp.float32)] * count for _ in sent.vectors]
    for i in range(count):
        for j in range(i, count):
            one, other = (_difference(sent.vectors[m], sent.anchor) / units[m] for m in (i, j))
            rows[i][j] = rows[j][i] = jnp.sum(one * other)
    here = shares > 0
    return jnp.where(here[:, None] & here[None, :], jnp.stack([jnp.stack(row) for row in rows]), 0)
