"""Outer optimizers: optax transformations of the merged outer gradient (paper, step 8), and their settings.

The merged outer gradient g_t plays the part of a gradient, so that Theta_new = Theta + updates. Each
fragment has a state of its own.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ddiloco.config import Marks, section, setting
from ddiloco.outer.codecs import CODECS, UPDATE_CODECS
from ddiloco.outer.fragments import STRATEGIES
from ddiloco.outer.guards import GuardConfig
from ddiloco.outer.merging import MERGE_RULES
from ddiloco.outer.momentum import delayed_nesterov, heloco

_OF_FRAGMENTS = Marks(may_change="never", because="versions and outer states are of those fragments")
_OF_STATES = Marks(may_change="never", because="the saved outer states are of that optimizer")

# Each takes the settings that it uses, by name; a learning rate may be one that moves.
OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "nesterov": lambda learning_rate, momentum: optax.sgd(learning_rate, momentum, nesterov=True),
    "direct": lambda: optax.scale(-1.0),
    "delayed_nesterov": lambda learning_rate, momentum, momentum_every: _with_rate(
        delayed_nesterov(momentum, momentum_every), learning_rate
    ),
    "heloco": lambda learning_rate, momentum: _with_rate(heloco(momentum), learning_rate),
}


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
        f"{', '.join(OPTIMIZERS)}, or an optimizer of optax",
        **_OF_STATES,
    )
    learning_rate: float = setting(0.7, "outer learning rate; `direct` has 1", above=0.0)
    rate_rounds: int = setting(
        0,
        "rounds of a fragment in which the rate goes in a straight line to final_rate; 0: it stays",
        at_least=0,
        **_OF_STATES,
    )
    final_rate: float = setting(1.0, "outer learning rate after `rate_rounds` rounds", above=0.0)
    momentum: float = setting(0.3, "momentum, of all but direct and optax's", at_least=0.0, below=1.0)
    momentum_every: int = setting(
        4, "rounds of a fragment between two steps of delayed_nesterov's momentum", at_least=1
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
        because="the saved outer states have what its updates left out, or have not",
    )
    guard: GuardConfig = section(GuardConfig, may_change="resume")

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            _optax_optimizer(self.optimizer)
            _check_use(self)
        if self.rate_rounds and "learning_rate" not in _used(self.optimizer):
            raise ValueError(
                f"rate_rounds: is {self.rate_rounds}, but {self.optimizer} has no outer rate to move"
            )
        if self.error_feedback and CODECS[self.codec].of_parameters:
            lossy = [name for name, codec in CODECS.items() if not codec.of_parameters]
            raise ValueError(
                f"error_feedback: is True, but codec {self.codec} leaves nothing out; "
                f"it needs a codec of {', '.join(lossy)}"
            )

    @property
    def idle(self) -> dict[str, str]:
        """The settings that change nothing beside the others, each with which of these."""
        unused = {name for one in OPTIMIZERS for name in _used(one)} - _used(self.optimizer)
        found = dict.fromkeys(unused, f"outer.optimizer is {self.optimizer}")
        if not self.rate_rounds:
            found["final_rate"] = "outer.rate_rounds is 0"
        if self.merge != "rda":
            found["embeddings"] = f"outer.merge is {self.merge}"
        return found


def make_outer_optimizer(config: OuterConfig) -> optax.GradientTransformation:
    """The outer optimizer that the settings name, for the merged outer gradient of one fragment."""
    settings = {name: getattr(config, name) for name in _used(config.optimizer)}
    if config.rate_rounds:
        settings["learning_rate"] = optax.linear_schedule(
            config.learning_rate, config.final_rate, config.rate_rounds
        )
    make = OPTIMIZERS.get(config.optimizer) or _optax_optimizer(config.optimizer)
    return make(**settings)


def _with_rate(
    direction: optax.GradientTransformation, rate: float | optax.Schedule
) -> optax.GradientTransformation:
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
