"""A learner's compiled programs on one mesh: the inner step and a fresh optimizer state."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ddiloco.training.inner_optimizer import InnerConfig, make_inner_optimizer
from ddiloco.training.step import (
    Metrics,
    TrainState,
    abstract_batch,
    abstract_state,
    compile_train_step,
    make_train_step,
    shard_batch,
    state_shardings,
)


class TrainProgram:
    """Compiled when made, so that no learner compiles in the run; learners on one mesh share it."""

    def __init__(
        self, model_config: Any, inner: InnerConfig, total_steps: int, mesh: Mesh, rows: int, seq_len: int
    ) -> None:
        self.mesh = mesh
        self.shardings = state_shardings(model_config, inner, mesh)
        state = abstract_state(model_config, inner, mesh)
        step = make_train_step(model_config, inner, total_steps, mesh)
        self._step = compile_train_step(step, state, abstract_batch(mesh, rows, seq_len))
        optimizer = make_inner_optimizer(inner, total_steps)
        init = jax.jit(optimizer.init, out_shardings=self.shardings.opt_state)
        self._init_optimizer = init.lower(state.params).compile()
        copy = functools.partial(jax.tree.map, jnp.copy)
        self._copy = jax.jit(copy, out_shardings=self.shardings.params).lower(state.params).compile()

    def step(
        self, state: TrainState, batch: Mapping[str, np.ndarray], clock: int
    ) -> tuple[TrainState, Metrics]:
        """Hands one inner step to the devices and returns at once; `state` is donated.

        `clock` is the number of steps before this one, by which the learning rate goes.
        """
        return self._step(state, shard_batch(batch, self.mesh), np.int32(clock))

    def state_from(self, params: Mapping[str, np.ndarray]) -> TrainState:
        """A state with a copy of these host parameters and a fresh inner optimizer."""
        placed = {
            name: jax.device_put(params[name], self.shardings.params[name]) for name in self.shardings.params
        }
        # On CPU devices `placed` may be the host's own memory, which a donating step would write into.
        own = self._copy(placed)
        return TrainState(own, self._init_optimizer(own))
