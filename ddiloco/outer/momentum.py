"""Momentum of merged outer gradients that optax has not: optax transformations, one state a fragment."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class DelayedState(NamedTuple):
    """State of `delayed_nesterov`."""

    rounds: jax.Array  # since the momentum's last step, int32
    total: optax.Updates  # of their outer gradients
    momentum: optax.Updates


def delayed_nesterov(momentum: float, every: int) -> optax.GradientTransformation:
    """Nesterov momentum that steps every so many rounds; the rounds between take plain steps.

      d_t = g_t, but in each `every`-th round  m <- momentum * m + sum of g since the last one,
                                               d_t = g_t + momentum * m

    The learning rate is not in it. Against the paper's form (arXiv 2401.09135, algorithm 2 with c = 0) rates
    are divided by `every`, so that a constant g takes as long a step as with Nesterov momentum, and
    `every = 1` is that.

    Example:
      >>> import jax.numpy as jnp
      >>> optimizer = delayed_nesterov(momentum=0.5, every=2)
      >>> state = optimizer.init(jnp.zeros(1))
      >>> for _ in range(4):
      ...     direction, state = optimizer.update(jnp.ones(1), state)
      ...     print(direction)
      [1.]
      [2.]
      [1.]
      [2.5]
    """

    def init(params: optax.Params) -> DelayedState:
        zeros = optax.tree.zeros_like
        return DelayedState(jnp.zeros((), jnp.int32), zeros(params), zeros(params))

    def update(
        gradients: optax.Updates, state: DelayedState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, DelayedState]:
        del params
        due = state.rounds + 1 >= every
        total = optax.tree.add(state.total, gradients)
        stepped = jax.tree.map(lambda m, g: momentum * m + g, state.momentum, total)
        trace = optax.tree.where(due, stepped, state.momentum)
        directions = jax.tree.map(lambda g, m: g + jnp.where(due, momentum, 0) * m, gradients, trace)
        total = optax.tree.where(due, optax.tree.zeros_like(total), total)
        return directions, DelayedState(jnp.where(due, 0, state.rounds + 1), total, trace)

    return optax.GradientTransformation(init, update)


class HelocoState(NamedTuple):
    """State of `heloco`."""

    momentum: optax.Updates  # a mean of the corrected outer gradients


# Above this cosine to the momentum a piece's outer gradient is left alone. The figure is ours, as are the
# strengths of the corrections, 1/2 and 1: those of the paper were not at hand.
_AGREES = 0.2


def heloco(momentum: float) -> optax.GradientTransformation:
    """Nesterov momentum of outer gradients that are turned towards it where they disagree (arXiv 2606.00271).

    Of each piece, with c the cosine between g and the momentum m, u and v their unit vectors, and
    s = |g| / (|g| + |m|):

      c >= 0.2      g stays
      0 <= c < 0.2  its direction becomes that of (1 - l) u + l v,  l = (1 - c) s / 2
      c < 0         it loses the share -c s of its component along m

    Then m <- momentum * m + (1 - momentum) * g, and the direction is g + momentum * m; the learning rate is
    not in it. The paper corrects each learner's outer gradient as it comes, on an older version than the
    newest. Here all in a merge are on the newest, and what is corrected is what they were merged to.

    Example:
      >>> import jax.numpy as jnp
      >>> optimizer = heloco(momentum=0.5)
      >>> state = optimizer.init(jnp.zeros(2))
      >>> for gradient in (jnp.array([2.0, 0.0]), jnp.array([-1.0, 0.0])):
      ...     direction, state = optimizer.update(gradient, state)
      ...     print(direction, state.momentum)
      [2.5 0. ] [1. 0.]
      [-0.375  0.   ] [0.25 0.  ]
    """

    def init(params: optax.Params) -> HelocoState:
        return HelocoState(optax.tree.zeros_like(params))

    def update(
        gradients: optax.Updates, state: HelocoState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, HelocoState]:
        del params
        corrected = jax.tree.map(_corrected, gradients, state.momentum)
        trace = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, state.momentum, corrected)
        directions = jax.tree.map(lambda g, m: g + momentum * m, corrected, trace)
        return directions, HelocoState(trace)

    return optax.GradientTransformation(init, update)


def _corrected(gradient: jax.Array, momentum: jax.Array) -> jax.Array:
    """One piece's outer gradient, turned towards its momentum; as it is where either is zero."""
    length, other = jnp.linalg.norm(gradient.ravel()), jnp.linalg.norm(momentum.ravel())
    both = (length > 0) & (other > 0)
    u, v = gradient / jnp.where(both, length, 1), momentum / jnp.where(both, other, 1)
    cosine = jnp.vdot(u, v)
    share = length / jnp.where(both, length + other, 1)
    towards = (1 - cosine) * share / 2
    turned = (1 - towards) * u + towards * v
    turned *= length / jnp.linalg.norm(turned.ravel()).clip(1e-12)
    against = gradient + cosine * cosine * share * length * v
    changed = jnp.where(cosine < 0, against, turned)
    return jnp.where(both & (cosine < _AGREES), changed, gradient)
