"""A learner's compiled programs on one mesh: the inner step; making, copying and loading of its state."""

from __future__ import annotations

import copy
import functools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ddiloco.arrays.blocks import Blocks, Cut, needed
from ddiloco.outer.stacks import array_of
from ddiloco.training import executable
from ddiloco.training.inner_optimizer import InnerConfig, learning_rate_at, make_inner_optimizer
from ddiloco.training.loss import Loss
from ddiloco.training.parameters import Parameters, logical_axes
from ddiloco.training.platform import compiler_options
from ddiloco.training.step import (
    Metrics,
    TrainState,
    abstract_batch,
    abstract_state,
    make_train_step,
    shard_batch,
    state_shardings,
)


def traced_step(
    model_config: Any,
    inner: InnerConfig,
    mesh: Mesh,
    rows: int,
    row: Mapping[str, jax.ShapeDtypeStruct],
    loss: Loss,
) -> jax.stages.Traced:
    """The inner step for batches of `rows` rows, each of the shapes and dtypes of `row`, to be compiled."""
    step = make_train_step(model_config, inner, mesh, loss)
    state = abstract_state(model_config, inner, mesh)
    return step.trace(state, abstract_batch(mesh, rows, row), jax.ShapeDtypeStruct((), jnp.float32))


def _placed(value: np.ndarray | Blocks, sharding: jax.sharding.Sharding) -> jax.Array:
    """A host array on the devices, in memory of its own."""
    device: jax.Device = next(iter(sharding.device_set))
    # CPU devices may use the host's own memory, into which a donating step would write.
    own = np.array if device.platform == "cpu" else np.asarray
    if sharding.is_fully_addressable:
        return jax.device_put(own(value), sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: own(value[index]))


def _numbers(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))


class TrainProgram:
    """Compiled when made, so that no learner compiles in the run; learners on one mesh share it."""

    def __init__(
        self,
        model_config: Any,
        inner: InnerConfig,
        mesh: Mesh,
        rows: int,
        row: tuple[tuple[str, jax.ShapeDtypeStruct], ...],
        loss: Loss,
        saved_step: str | None = None,
    ) -> None:
        """Compiles for batches of `rows` rows; `row`: name, shape and dtype of each array of one.

        `saved_step`: a file with the compiled step; raises ConfigError where that is not this one.
        """
        self.mesh = mesh
        self._inner, self._total_steps = inner, 0  # by which the learning rate goes, and nothing compiled
        self._laid = state_shardings(model_config, inner, mesh)
        self.shardings = self._laid.params
        state = abstract_state(model_config, inner, mesh)
        lowered = traced_step(model_config, inner, mesh, rows, dict(row), loss).lower()
        if saved_step is None:
            self._step = lowered.compile(compiler_options=compiler_options(mesh))
        else:
            self._step = executable.load(pathlib.Path(saved_step), lowered, mesh)
        optimizer = make_inner_optimizer(inner, logical_axes(model_config))
        init = jax.jit(optimizer.init, out_shardings=self._laid.opt_state)
        self._init_optimizer = init.lower(state.params).compile()
        zeros = functools.partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state.params)
        self._zeros = jax.jit(zeros, out_shardings=self.shardings)
        copied = functools.partial(jax.tree.map, jnp.copy)
        self._copy = jax.jit(copied, out_shardings=self.shardings).lower(state.params).compile()
        copy_inner = jax.jit(copied, out_shardings=self._laid.opt_state)
        self._copy_inner = copy_inner.lower(state.opt_state).compile()
        self.inner_leaves: list[jax.ShapeDtypeStruct] = jax.tree.leaves(state.opt_state)

    def of_run(self, total_steps: int) -> TrainProgram:
        """The same compiled programs for a run of so many steps."""
        other = copy.copy(self)
        other._total_steps = total_steps
        return other

    def tokens(self, batch: Mapping[str, np.ndarray]) -> int:
        """The targets of the batch that count."""
        return int(batch["weights"].sum())

    def step(
        self, state: TrainState, batch: Mapping[str, np.ndarray], clock: int
    ) -> tuple[TrainState, Metrics]:
        """Hands one inner step to the devices and returns at once; `state` is donated.

        `clock` is the number of steps before this one, by which the learning rate goes.
        """
        rate = learning_rate_at(self._inner, self._total_steps, clock)
        return self._step(state, shard_batch(batch, self.mesh), rate)

    def state_from(
        self, params: Mapping[str, np.ndarray], inner: Sequence[np.ndarray] | None = None
    ) -> TrainState:
        """A state with a copy of these host parameters, in either form, and of this inner optimizer state.

        The devices hold one copy of either, and what is on its way.

        `inner` has an array for each of `inner_leaves`, as `inner_state` gave them; None: a fresh one.

        Raises:
          ValueError: it has other arrays.
        """
        laid = self.shardings.items()
        return self.state_of({name: _placed(array_of(name, params), at) for name, at in laid}, inner)

    def state_of(self, params: Parameters, inner: Sequence[np.ndarray | Blocks] | None = None) -> TrainState:
        """Like `state_from`, of parameters that are on the devices already, and become the state's."""
        if inner is None:
            return TrainState(params, self._init_optimizer(params))
        given, wanted = [leaf.shape for leaf in inner], [leaf.shape for leaf in self.inner_leaves]
        if given != wanted:
            raise ValueError(
                "the inner state is of another optimizer, or of another version of ddiloco: it has "
                f"{len(given)} arrays and {_numbers(given)} numbers, not {len(wanted)} and {_numbers(wanted)}"
            )
        shardings, structure = jax.tree.flatten(self._laid.opt_state)
        leaves = [_placed(leaf, sharding) for leaf, sharding in zip(inner, shardings, strict=True)]
        return TrainState(params, jax.tree.unflatten(structure, leaves))

    def inner_needs(self) -> list[Cut]:
        """The blocks of each of `inner_leaves` that this process's devices hold."""
        laid = zip(jax.tree.leaves(self._laid.opt_state), self.inner_leaves, strict=True)
        return [needed(sharding, leaf.shape) for sharding, leaf in laid]

    def zeros(self) -> Parameters:
        """Zeros in the place of all parameters, on the devices."""
        return self._zeros()

    def copy(self, state: TrainState) -> TrainState:
        """A copy of the state as the last step leaves it, of as much memory on the devices."""
        return TrainState(self._copy(state.params), self._copy_inner(state.opt_state))

    def inner_state(self, state: TrainState) -> list[jax.Array]:
        """A copy of the inner optimizer state as the last step leaves it, on its way to the host."""
        leaves = jax.tree.leaves(self._copy_inner(state.opt_state))
        for leaf in leaves:
            leaf.copy_to_host_async()
        return leaves
