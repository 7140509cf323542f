"""Evaluation: loss and statistics of given parameters over held-out batches, the same on every mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from ddiloco.training.loss import Batch, Loss, LossSums, next_token_loss, statistics
from ddiloco.training.parameters import Parameters
from ddiloco.training.sharding import OnMesh, batch_sharding, parameter_shardings, replicated
from ddiloco.training.step import shard_batch

EvalStep = Callable[[Parameters, Batch], LossSums]


class Score(NamedTuple):
    """The result of an evaluation."""

    loss: float
    """Nats per token."""
    statistics: Mapping[str, float] = {}
    """The model's own metrics, by name."""


@functools.lru_cache(maxsize=16)
def make_eval_step(model_config: Any, mesh: Mesh, loss: Loss = next_token_loss) -> EvalStep:
    """The jitted `(params, batch) -> LossSums` of one batch, without z-loss; cached."""
    constrain = OnMesh(mesh)

    def step(params: Parameters, batch: Batch) -> LossSums:
        return loss(model_config, params, batch, 0.0, constrain)

    shardings = parameter_shardings(model_config, mesh)
    return jax.jit(step, in_shardings=(shardings, batch_sharding(mesh)), out_shardings=replicated(mesh))


def evaluate(
    model_config: Any,
    eval_step: EvalStep,
    params: Parameters,
    batches: Iterable[Mapping[str, np.ndarray]],
    mesh: Mesh,
) -> Score:
    """The score over all batches, host arrays, summed in float64; raises ValueError if no target counts."""
    total: LossSums | None = None
    ahead: LossSums | None = None
    for batch in batches:
        # One batch is computed while the sums of the one before are fetched; more would fill the device.
        fetched, ahead = ahead, eval_step(params, shard_batch(batch, mesh))
        total = _added(total, fetched)
    total = _added(total, ahead)
    if total is None or total.tokens == 0:
        raise ValueError("the evaluation has no tokens: its batches are empty or all padding")
    metrics = statistics(model_config, total)
    return Score(float(total.nll / total.tokens), {name: float(value) for name, value in metrics.items()})


def _added(total: LossSums | None, sums: LossSums | None) -> LossSums | None:
    if sums is None:
        return total
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), sums)
    return wide if total is None else jax.tree.map(np.add, total, wide)
