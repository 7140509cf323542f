"""Outer optimizers: optax transformations of the merged outer gradient (paper, step 8), and their settings.

The merged outer gradient g_t plays the part of a gradient, so that Theta_new = Theta + updates. Each
fragment has a state of its own.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ddiloco.config import Marks, section, setting
from ddiloco.outer.codecs import CODECS, UPDATE_CODECS
from ddiloco.outer.fragments import STRATEGIES
from ddiloco.outer.guards import GuardConfig
from ddiloco.outer.merging import MERGE_RULES

_OF_FRAGMENTS = Marks(may_change="never", because="versions and outer states are of those fragments")
_OF_STATES = Marks(may_change="never", because="the saved outer states are of that optimizer")

MOMENTUM_EVERY = 4
"""Rounds of a fragment between two steps of `delayed_nesterov`'s momentum: with this it was measured."""

# Each takes the settings that it uses, by name.
OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "nesterov": lambda learning_rate, momentum: optax.sgd(learning_rate, momentum, nesterov=True),
    "direct": lambda: optax.scale(-1.0),
    "delayed_nesterov": lambda learning_rate, momentum: _with_rate(
        delayed_nesterov(momentum, MOMENTUM_EVERY), learning_rate
    ),
    "heloco": lambda learning_rate, momentum: _with_rate(heloco(momentum), learning_rate),
}


@dataclasses.dataclass(frozen=True)
class OuterConfig:
    """The outer optimizer, merge rule and codecs."""

    fragmentation: str = setting(
        "balanced", "how tensors are divided into fragments", choices=tuple(STRATEGIES), **_OF_FRAGMENTS
    )
    merge: str = setting("rda", "merge rule", choices=tuple(MERGE_RULES))
    embeddings: str = setting(
        "direct", "merge rule of embeddings and head where `merge` is rda", choices=tuple(MERGE_RULES)
    )
    optimizer: str = setting(
        "nesterov",
        f"{', '.join(OPTIMIZERS)}, or an optimizer of optax",
        **_OF_STATES,
    )
    learning_rate: float = setting(0.7, "outer learning rate; `direct` has 1", above=0.0)
    momentum: float = setting(0.3, "momentum, of all but direct and optax's", at_least=0.0, below=1.0)
    codec: str | tuple[str, ...] = setting(
        "f32",
        "what learners send: parameters in f32, or outer gradients in fewer bytes; with commas one for each "
        "learner",
        choices=tuple(CODECS),
        both_ends=True,
    )
    error_feedback: bool = setting(
        False, "whether a learner adds what its last merged encoding left out to its next one", both_ends=True
    )
    update_codec: str = setting(
        "f32",
        "how the syncer sends a new version: whole in f32, or its difference from the last in fewer bytes",
        choices=tuple(UPDATE_CODECS),
        both_ends=True,
        may_change="never",
        because="the saved outer states have what its updates left out, or have not",
    )
    guard: GuardConfig = section(GuardConfig, may_change="resume")

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            _optax_optimizer(self.optimizer)
            _check_use(self)
        if self.error_feedback and self.all_exact:
            lossy = [name for name, codec in CODECS.items() if not codec.exact]
            raise ValueError(
                f"error_feedback: is True, but codec {' and '.join(self.codecs)} leaves nothing out; "
                f"it needs a codec of {', '.join(lossy)}"
            )

    @property
    def each_codec(self) -> tuple[str, ...]:
        """By learner, the codec of its offers; learners beyond the list send in its last."""
        return (self.codec,) if isinstance(self.codec, str) else self.codec

    @property
    def codecs(self) -> tuple[str, ...]:
        """Those in which learners send, each once."""
        return tuple(dict.fromkeys(self.each_codec))

    @property
    def all_exact(self) -> bool:
        """Whether every learner sends in an exact codec; if one does not, all send outer gradients."""
        return all(CODECS[name].exact for name in self.codecs)

    def codec_of(self, learner: int) -> str:
        """The codec of the learner's offers."""
        return self.each_codec[min(learner, len(self.each_codec) - 1)]

    def with_codec(self, name: str) -> OuterConfig:
        """The settings of learners that send in this codec; an exact one leaves nothing for later."""
        feedback = self.error_feedback and not CODECS[name].exact
        return dataclasses.replace(self, codec=name, error_feedback=feedback)

    @property
    def idle(self) -> dict[str, str]:
        """The settings that change nothing beside the others, each with which of these."""
        unused = {name for one in OPTIMIZERS for name in _used(one)} - _used(self.optimizer)
        found = dict.fromkeys(unused, f"outer.optimizer is {self.optimizer}")
        if self.merge != "rda":
            found["embeddings"] = f"outer.merge is {self.merge}"
        return found


def make_outer_optimizer(config: OuterConfig) -> optax.GradientTransformation:
    """The outer optimizer that the settings name, for the merged outer gradient of one fragment."""
    settings = {name: getattr(config, name) for name in _used(config.optimizer)}
    make = OPTIMIZERS.get(config.optimizer) or _optax_optimizer(config.optimizer)
    return make(**settings)


def _with_rate(direction: optax.GradientTransformation, rate: float) -> optax.GradientTransformation:
    return optax.chain(direction, optax.scale_by_learning_rate(rate))


def _used(optimizer: str) -> set[str]:
    """The settings that an optimizer of this name takes; one of optax takes the learning rate alone."""
    own = OPTIMIZERS.get(optimizer)
    return {"learning_rate"} if own is None else set(inspect.signature(own).parameters)


def _check_use(config: OuterConfig) -> None:
    """Raises ValueError if the optimizer cannot step from a gradient alone, or has a state of no numbers."""

    def step(gradient: jax.Array) -> Any:
        optimizer = make_outer_optimizer(config)
        return optimizer.update(gradient, optimizer.init(gradient), gradient)

    try:
        kept = jax.tree.leaves(jax.eval_shape(step, jax.ShapeDtypeStruct((2, 2), jnp.float32)))
        problem = "its state holds a random key" if any(map(_is_key, kept)) else None
    except Exception as error:  # whatever an optimizer of optax raises of what it needs
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    if problem is not None:
        raise ValueError(f"optimizer: {config.optimizer} cannot step from merged outer gradients: {problem}")


def _is_key(leaf: jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _optax_optimizer(name: str) -> Callable[..., optax.GradientTransformation]:
    factory = getattr(optax, name, None)
    if inspect.isfunction(factory) and not name.startswith("_"):
        parameters = inspect.signature(factory).parameters
        needed = {p.name for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
        if "learning_rate" in parameters and needed <= {"learning_rate"}:
            return factory
    raise ValueError(
        f"optimizer: is {name!r}, but must be one of {', '.join(OPTIMIZERS)} "
        "or an optax optimizer that needs only a learning rate"
    )


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
