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


@dataclasses.dataclass(frozen=True)
class OuterConfig:
    """How learners' fragments become the next global model."""

    fragmentation: str = setting(
        "balanced", "how tensors are divided into fragments", choices=tuple(STRATEGIES), **_OF_FRAGMENTS
    )
    split_large: bool = setting(
        True, "whether tensors larger than a fragment's share are cut along their rows", **_OF_FRAGMENTS
    )
    merge: str = setting("rda", "merge rule", choices=tuple(MERGE_RULES))
    embeddings: str = setting(
        "direct", "merge rule of embeddings and head where `merge` is rda", choices=tuple(MERGE_RULES)
    )
    optimizer: str = setting(
        "nesterov",
        "nesterov, direct, moving_average, persistence, or the name of an optax optimizer",
        may_change="never",
        because="the outer states in the snapshot are of that optimizer",
    )
    learning_rate: float = setting(
        0.7, "outer learning rate; `direct` has 1 and `persistence` sets its own", above=0.0
    )
    momentum: float = setting(
        0.3, "momentum of nesterov, moving_average and persistence", at_least=0.0, below=1.0
    )
    target: float = setting(
        1.0, "effective outer step rate/(1 - momentum*rho) that `persistence` holds", above=0.0
    )
    rho_decay: float = setting(
        0.8, "decay per round of the average of rho that `persistence` keeps", at_least=0.0, below=1.0
    )

    codec: str = setting(
        "f32",
        "what learners send: parameters in f32, or outer gradients in fewer bytes",
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
        because="the outer states in the snapshot have what its updates left out, or have not",
    )
    guard: GuardConfig = section(GuardConfig, may_change="resume")

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            _optax_optimizer(self.optimizer)
        if self.error_feedback and CODECS[self.codec].of_parameters:
            lossy = [name for name, codec in CODECS.items() if not codec.of_parameters]
            raise ValueError(
                f"error_feedback: is True, but codec {self.codec} leaves nothing out; "
                f"it needs a codec of {', '.join(lossy)}"
            )


def make_outer_optimizer(config: OuterConfig) -> optax.GradientTransformation:
    """The outer optimizer that the settings name, for the merged outer gradient of one fragment."""
    if config.optimizer in OPTIMIZERS:
        return OPTIMIZERS[config.optimizer](config)
    return _optax_optimizer(config.optimizer)(learning_rate=config.learning_rate)


class PersistenceState(NamedTuple):
    """State of `persistence`."""

    measured: jax.Array  # how often rho has been measured, int32
    rho_sum: jax.Array  # exponential moving average of the measured cosines, which starts from 0
    rho: jax.Array  # the same, corrected for that start; 0 until two outer gradients have been seen
    rate: jax.Array  # learning rate of the newest update; 0 before the first
    previous: optax.Updates  # the newest outer gradient
    momentum: optax.Updates  # m_t


def persistence(target: float, momentum: float, rho_decay: float) -> optax.GradientTransformation:
    """Momentum whose effective step does not depend on how alike successive outer gradients are.

      m_t = momentum * m_{t-1} + g_t
      rate_t = target * (1 - momentum * rho_t)
      update = -rate_t * m_t

    rho_t is an exponential moving average of the cosine between successive outer gradients g_{t-1} and g_t,
    over the whole fragment. If that cosine were constant, momentum with a fixed rate would move Theta along
    each outer gradient by rate / (1 - momentum * rho): this is what `target` holds.

    Args:
      target: the effective step, rate / (1 - momentum * rho).
      momentum: 0 <= momentum < 1.
      rho_decay: weight of the past in rho, a round.

    Example:
      >>> import jax.numpy as jnp
      >>> optimizer = persistence(target=1.0, momentum=0.5, rho_decay=0.0)
      >>> state = optimizer.init(jnp.zeros(2))
      >>> for gradient in (jnp.array([1.0, 0.0]), jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0])):
      ...     _, state = optimizer.update(gradient, state)
      ...     print(f"rho {state.rho:.1f} rate {state.rate:.2f}")
      rho 0.0 rate 1.00
      rho 1.0 rate 0.50
      rho 0.0 rate 1.00
    """

    def init(params: optax.Params) -> PersistenceState:
        zero = jnp.zeros((), jnp.float32)
        zeros = optax.tree.zeros_like
        return PersistenceState(jnp.zeros((), jnp.int32), zero, zero, zero, zeros(params), zeros(params))

    def update(
        gradients: optax.Updates, state: PersistenceState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, PersistenceState]:
        del params
        lengths = optax.tree.norm(gradients) * optax.tree.norm(state.previous)
        measured = lengths > 0  # not in the first round, nor where nobody moved
        cosine = optax.tree.vdot(gradients, state.previous) / jnp.where(measured, lengths, 1)
        times = state.measured + measured
        rho_sum = jnp.where(measured, rho_decay * state.rho_sum + (1 - rho_decay) * cosine, state.rho_sum)
        rho = jnp.where(times > 0, rho_sum / (1 - rho_decay ** jnp.maximum(times, 1)), 0)
        rho = jnp.clip(rho, -1, 1)
        rate = target * (1 - momentum * rho)
        trace = jax.tree.map(lambda m, g: momentum * m + g, state.momentum, gradients)
        updates = jax.tree.map(lambda m: -rate * m, trace)
        return updates, PersistenceState(times, rho_sum, rho, rate, gradients, trace)

    return optax.GradientTransformation(init, update)


def measurements(state: Any) -> dict[str, jax.Array]:
    """The metrics in an outer optimizer's state: `rho` and `outer_rate` if `persistence` is part of it."""
    parts = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, PersistenceState))
    found = [part for part in parts if isinstance(part, PersistenceState)]
    return {"rho": found[0].rho, "outer_rate": found[0].rate} if found else {}


OPTIMIZERS: dict[str, Callable[[OuterConfig], optax.GradientTransformation]] = {
    "nesterov": lambda config: optax.sgd(config.learning_rate, config.momentum, nesterov=True),
    "direct": lambda config: optax.scale(-1.0),
    # The weights of all past outer gradients add up to 1, unlike momentum's: the rate is the effective step.
    "moving_average": lambda config: optax.chain(
        optax.ema(config.momentum, debias=False), optax.scale(-config.learning_rate)
    ),
    "persistence": lambda config: persistence(config.target, config.momentum, config.rho_decay),
}


_OF_THE_LOSS = ("lbfgs",)  # an update takes values of the loss, which nobody has of a merge


def _optax_optimizer(name: str) -> Callable[..., optax.GradientTransformation]:
    factory = getattr(optax, name, None)
    if inspect.isfunction(factory) and not name.startswith("_"):
        parameters = inspect.signature(factory).parameters
        needed = {p.name for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
        if "learning_rate" in parameters and needed <= {"learning_rate"} and name not in _OF_THE_LOSS:
            return factory
    raise ValueError(
        f"optimizer: is {name!r}, but must be one of {', '.join(OPTIMIZERS)} "
        "or an optax optimizer that needs only a learning rate"
    )
