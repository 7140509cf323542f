"""The inner optimizer: AdamW or Muon, with a learning rate by the learner's clock, not a count."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from ddiloco.config import Marks, setting
from ddiloco.models.parameter import Axes
from ddiloco.outer.stacks import is_stack
from ddiloco.training.muon import muon

_OF_STATES = Marks(may_change="never", because="the learners' inner states have its arrays")


@dataclasses.dataclass(frozen=True)
class InnerConfig:
    """Settings of the inner optimizer and of the loss that it minimises."""

    optimizer: str = setting(
        "adamw",
        "what moves the matrices of layers; all else goes by AdamW",
        choices=("adamw", "muon"),
        **_OF_STATES,
    )
    learning_rate: float = setting(3e-3, "peak learning rate", at_least=0.0)
    warmup_steps: int = setting(40, "steps of linear warm-up", at_least=0)
    final_fraction: float = setting(0.1, "share of the peak left at the end", at_least=0.0, at_most=1.0)
    weight_decay: float = setting(0.1, "decoupled decay, times the learning rate", at_least=0.0)
    decay_embeddings: bool = setting(False, "decay the input embedding too")
    b1: float = setting(0.9, "decay of Adam's first moment", at_least=0.0, below=1.0)
    b2: float = setting(0.95, "decay of Adam's second moment", at_least=0.0, below=1.0)
    mu_dtype: str = setting(
        "float32", "type in which first moments are kept", choices=("bfloat16", "float32"), **_OF_STATES
    )
    momentum: float = setting(0.95, "decay of Muon's mean of gradients", at_least=0.0, below=1.0)
    update_rms: float = setting(
        0.2, "root mean square of Muon's update before the learning rate; 0.2 is like Adam's", above=0.0
    )
    eps: float = setting(1e-8, "added to the root of Adam's second moment", above=0.0)
    clip_norm: float | None = setting(1.0, "largest global norm of a gradient; None is off", above=0.0)
    accumulation: int = setting(
        1, "micro-batches that a step's rows are split into", at_least=1, both_ends=False
    )
    z_loss: float = setting(0.0, "weight of the squared log-normaliser in the loss", at_least=0.0)


def learning_rate_at(config: InnerConfig, total_steps: int, clock: int) -> np.float32:
    """Learning rate of the step before which `clock` steps were taken.

    A linear warm-up, whose first step is not zero; then half a cosine down to `final_fraction *
    learning_rate` at `clock = total_steps`; constant after that. There is no cosine if the warm-up is as long
    as the run.
    """
    warm = min(1.0, (clock + 1) / max(config.warmup_steps, 1))
    progress = (clock - config.warmup_steps) / max(total_steps - config.warmup_steps, 1)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
    share = config.final_fraction + (1.0 - config.final_fraction) * cosine
    return np.float32(config.learning_rate * warm * share)


def decay_mask(config: InnerConfig, params: Mapping[str, Any]) -> dict[str, bool]:
    """Which parameters decay: matrices, embeddings only if configured, and never a norm or a bias."""

    def decays(name: str, axes: int) -> bool:
        matrix = axes >= 2 and not name.endswith("/bias")
        return matrix and (config.decay_embeddings or not name.startswith("embed"))

    return {name: decays(name, leaf.ndim - is_stack(name)) for name, leaf in params.items()}


def scale_by_rate() -> optax.GradientTransformationExtraArgs:
    """Multiplies updates by minus `rate`, an extra argument (float32 scalar)."""

    def update(
        updates: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
        *,
        rate: jax.Array | np.float32,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params, extra_args
        return jax.tree.map(lambda leaf: -rate * leaf, updates), state

    return optax.GradientTransformationExtraArgs(optax.identity().init, update)


def make_inner_optimizer(
    config: InnerConfig, axes: Mapping[str, Axes], shardings: Mapping[str, NamedSharding] | None = None
) -> optax.GradientTransformationExtraArgs:
    """AdamW (arXiv 1711.05101) after clipping by the global norm; `update` takes the extra argument `rate`.

    The learning rate comes from outside, so that what is compiled serves every schedule.

    Where `config.optimizer` is `muon`, that takes Adam's place for the matrices of layers; `axes` has the
    logical axes of every parameter, by which they are known, and the devices of `shardings` share them.

    The clock may jump forward, as when an update from the syncer carries a later global step. The learning
    rate jumps with it; the bias correction of the moments counts the steps really taken.
    """
    parts: list[optax.GradientTransformation] = []
    if config.clip_norm is not None:
        parts.append(optax.clip_by_global_norm(config.clip_norm))
    scaled = optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=config.mu_dtype)
    if config.optimizer == "muon":
        scaled = muon(axes, config.momentum, config.mu_dtype, config.update_rms, scaled, shardings)
    parts.append(scaled)
    if config.weight_decay:
        mask = functools.partial(decay_mask, config)
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=mask))
    parts.append(scale_by_rate())
    return optax.with_extra_args_support(optax.chain(*parts))
