"""Evaluation: nats a token of given parameters over batches, the same whatever the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ddiloco.training.loss import Batch, Loss, next_token_loss
from ddiloco.training.mesh import batch_sharding, constrainer, parameter_shardings, replicated
from ddiloco.training.parameters import Parameters
from ddiloco.training.step import shard_batch

EvalStep = Callable[[Parameters, Batch], tuple[jax.Array, jax.Array]]


def make_eval_step(model_config: Any, mesh: Mesh, loss: Loss = next_token_loss) -> EvalStep:
    """The jitted `(params, batch) -> (nll, tokens)`: summed nats, float32, and targets that count, int32."""
    constrain = constrainer(mesh)

    def step(params: Parameters, batch: Batch) -> tuple[jax.Array, jax.Array]:
        sums = loss(model_config, params, batch, 0.0, constrain)
        return sums.nll, sums.tokens

    shardings = parameter_shardings(model_config, mesh)
    return jax.jit(step, in_shardings=(shardings, batch_sharding(mesh)), out_shardings=replicated(mesh))


def evaluate(
    eval_step: EvalStep, params: Parameters, batches: Iterable[Mapping[str, np.ndarray]], mesh: Mesh
) -> float:
    """Nats a token over all batches (host arrays), added up in float64 on the host.

    Raises:
      ValueError: no batch has a target that counts.
    """
    nll, tokens = 0.0, 0
    ahead: tuple[jax.Array, jax.Array] | None = None
    for batch in batches:
        # One batch is computed while the last one's sums are fetched; more would pile up on the device.
        fetched, ahead = ahead, eval_step(params, shard_batch(batch, mesh))
        if fetched is not None:
            nll, tokens = nll + float(fetched[0]), tokens + int(fetched[1])
    if ahead is not None:
        nll, tokens = nll + float(ahead[0]), tokens + int(ahead[1])
    if tokens == 0:
        raise ValueError("the evaluation has no tokens: its batches are empty or all padding")
    return nll / tokens
