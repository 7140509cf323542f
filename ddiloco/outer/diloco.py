"""DiLoCo of one learner in one process, as a wrapper around an optimizer of optax."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ddiloco.config import ConfigError, build
from ddiloco.outer.fragments import FragmentLayout, fragment, leaf_names, put, take
from ddiloco.outer.merging import MERGE_RULES, Sent, norm_of
from ddiloco.outer.optimizer import OuterConfig, make_outer_optimizer
from ddiloco.outer.outer_step import rule_of, step_tensor
from ddiloco.protocol.schedule import Schedule

_Tensors = dict[str, jax.Array]
_OF_MESSAGES = ("codec", "error_feedback", "update_codec", "guard")


class DilocoState(NamedTuple):
    """State of `diloco`."""

    inner: Any  # the inner optimizer's
    step: jax.Array  # inner steps taken, int32
    global_params: Any  # Theta: of each fragment the parameters after its last outer step
    outer: tuple[tuple[Any, ...], ...]  # the outer optimizer's, by fragment and piece


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DilocoUpdate:
    """The update of one parameter: `parameter + update` is its next value.

    An array would not do: an outer step sets a parameter to a value that float32 may not reach by a sum.
    """

    increment: jax.Array
    target: jax.Array
    sets: jax.Array  # whether the next value is the target, bool

    __array_ufunc__ = None  # NumPy's arrays leave the sum to this class, too

    def __radd__(self, parameter: jax.Array) -> jax.Array:
        return jnp.where(self.sets, self.target, parameter + self.increment)


def diloco(
    inner: optax.GradientTransformation,
    interval: int,
    *,
    num_fragments: int = 1,
    steps: int | None = None,
    **outer: Any,
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo with M = 1: every `interval` inner steps, an outer step on the distance that they went.

    This is Lookahead (arXiv 1907.08610) with an outer optimizer. On CPU it gives the bits of a run of one
    learner that waits for its updates. It must be the outermost wrapper; its updates are for
    `optax.apply_updates`. `DilocoState.global_params` are for evaluation. An outer step that is not finite is
    not taken.

    Args:
      inner: the optimizer of the inner steps.
      interval: H.
      num_fragments: P. The outer steps of fragment p are after the steps t with t mod H = floor(p * H / P).
      steps: T, the last inner step, after which all fragments have an outer step; None: there is no last one.
      outer: settings of a run's group `outer`, such as `optimizer`, `learning_rate` and `momentum`.

    Raises:
      ConfigError: a setting has a value that it may not have.

    Example:
      >>> import jax.numpy as jnp
      >>> optimizer = diloco(optax.sgd(0.5), interval=2, learning_rate=0.5, momentum=0.0)
      >>> params = {"w": jnp.ones(1)}
      >>> state = optimizer.init(params)
      >>> for _ in range(4):
      ...     updates, state = optimizer.update({"w": jnp.ones(1)}, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(params["w"], state.global_params["w"])
      [0.5] [1.]
      [0.5] [0.5]
      [0.] [0.5]
      [0.] [0.]
    """
    for name in _OF_MESSAGES:
        if name in outer:
            raise ConfigError(f"diloco.{name}: is there, but in one process nothing is sent")
    config = build(OuterConfig, outer, "diloco")
    for name, count in (("interval", interval), ("num_fragments", num_fragments), ("steps", steps or 1)):
        if count < 1:
            raise ConfigError(f"diloco.{name}: is {count}, but must be at least 1")
    inner = optax.with_extra_args_support(inner)
    schedule = Schedule(num_fragments, interval, steps)

    def layout_of(params: optax.Params) -> FragmentLayout:
        shapes = {name: x.shape for name, x in _tensors(params).items()}
        return fragment(shapes, num_fragments, config.fragmentation)

    def init(params: optax.Params) -> DilocoState:
        layout, begin = layout_of(params), make_outer_optimizer(config).init
        outer_states = (tuple(map(begin, take(layout, p, _tensors(params)))) for p in range(num_fragments))
        theta = jax.tree.map(jnp.copy, params)  # so that a step may donate both
        return DilocoState(inner.init(params), jnp.zeros((), jnp.int32), theta, tuple(outer_states))

    def update(
        gradients: optax.Updates, state: DilocoState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, DilocoState]:
        if params is None:
            raise ValueError("diloco: update needs params, its third argument")
        layout, step = layout_of(params), state.step + 1
        increments, inner_state = inner.update(gradients, state.inner, params, **extra)
        own, theta = map(_tensors, (optax.apply_updates(params, increments), state.global_params))
        outer_states, sets = [], jnp.bool_(False)
        for p, states in enumerate(state.outer):
            due = (step % interval == schedule.offset(p)) | (step == steps)
            arrays = zip(take(layout, p, own), take(layout, p, theta), states, strict=True)
            rules = (rule_of(config, piece.name) for piece in layout.fragments[p])
            stepped = [
                _outer_step(config, *of_piece, due, step) for of_piece in zip(rules, arrays, strict=True)
            ]
            pieces, thetas, new_states = zip(*stepped, strict=True)
            own, theta = put(layout, p, own, pieces), put(layout, p, theta, thetas)
            outer_states.append(new_states)
            sets |= due
        structure = jax.tree.structure(params)
        targets, theta = (jax.tree.unflatten(structure, tensors.values()) for tensors in (own, theta))
        updates = jax.tree.map(lambda u, x: DilocoUpdate(u, x, sets), increments, targets)
        return updates, DilocoState(inner_state, step, theta, tuple(outer_states))

    return optax.GradientTransformationExtraArgs(init, update)


def _tensors(tree: Any) -> _Tensors:
    """The leaves by name, in their order; raises ValueError if one is not float32."""
    tensors = dict(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))
    for name, x in tensors.items():
        if x.dtype != jnp.float32:
            raise ValueError(f"diloco: {name} is {x.dtype}, but parameters must be float32")
    return tensors


def _outer_step(
    config: OuterConfig,
    rule: str,
    arrays: tuple[jax.Array, jax.Array, Any],
    due: jax.Array,
    step: jax.Array,
) -> tuple[jax.Array, jax.Array, Any]:
    """A piece of the parameters, of Theta, and its outer state after the step; as they were if none is due.

    Branches take and give the arrays of `OuterStep`'s programs, and weights that XLA does not know: only what
    is compiled apart from the rest comes to the same bits.
    """
    own, theta, state = arrays
    norms = jax.lax.cond(due, lambda *of: norm_of(*of)[None], lambda *_: jnp.zeros(1), own, theta)

    def stepped(
        own: jax.Array, theta: jax.Array, state: Any, weights: jax.Array, norms: jax.Array
    ) -> tuple[jax.Array, Any, jax.Array]:
        merged = MERGE_RULES[rule](Sent((own,), weights, theta, norms))
        return step_tensor(config, merged.unscaled, merged.scale, theta, state)

    def kept(
        own: jax.Array, theta: jax.Array, state: Any, weights: jax.Array, norms: jax.Array
    ) -> tuple[jax.Array, Any, jax.Array]:
        return theta, state, jnp.bool_(False)

    weights = jnp.ones(1) * (step > 0)
    new, new_state, finite = jax.lax.cond(due, stepped, kept, own, theta, state, weights, norms)
    states = optax.tree.where(finite, new_state, state)
    return jnp.where(finite, new, own), jnp.where(finite, new, theta), states
