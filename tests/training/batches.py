"""Batches of random tokens packed as the data pipeline packs them, meshes and states to run them on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ddiloco.models.dense import DenseConfig
from ddiloco.outer.stacks import stacked
from ddiloco.training.inner_optimizer import learning_rate_at, make_inner_optimizer
from ddiloco.training.mesh import MeshConfig, carve
from ddiloco.training.parameters import logical_axes, sampled_parameters
from ddiloco.training.step import TrainState, make_train_step, shard_batch, state_shardings

TINY = DenseConfig(
    vocab_size=32,
    num_layers=2,
    model_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=32,
    compute_dtype="float32",
)


def packed_batch(seed: int, rows: int, seq_len: int, vocab_size: int) -> dict[str, np.ndarray]:
    """Rows of two documents of random lengths, each followed by some padding."""
    rng = np.random.default_rng(seed)
    batch = {
        name: np.zeros((rows, seq_len), np.int32)
        for name in ("inputs", "targets", "segments", "positions", "weights")
    }
    for row in range(rows):
        first = int(rng.integers(2, seq_len // 2))
        second = int(rng.integers(2, seq_len - first))
        start = 0
        for segment, length in enumerate((first, second), start=1):
            span = slice(start, start + length)
            tokens = rng.integers(0, vocab_size, length + 1)
            batch["inputs"][row, span], batch["targets"][row, span] = tokens[:-1], tokens[1:]
            batch["segments"][row, span], batch["positions"][row, span] = segment, np.arange(length)
            batch["weights"][row, start : start + length - 1] = 1
            start += length
    return batch


def mesh_of(num_devices: int, **sizes: int) -> Mesh:
    """One mesh over the first devices."""
    return carve(jax.devices()[:num_devices], 1, MeshConfig(**sizes))[0]


def init_state(model_config, inner, mesh, seed, params=None):
    """The state before the first step, with these parameters (copied) or with initial ones."""
    laid = state_shardings(model_config, inner, mesh)
    params = dict(sampled_parameters(model_config, seed)) if params is None else params
    placed = jax.device_put(stacked(params, laid.params), laid.params)
    own = jax.jit(functools.partial(jax.tree.map, jnp.copy), out_shardings=laid.params)(placed)
    optimizer = make_inner_optimizer(inner, logical_axes(model_config))
    return TrainState(own, jax.jit(optimizer.init, out_shardings=laid.opt_state)(own))


def trained(model_config, inner, mesh, batches, *loss):
    """The state after a step on each batch, and each step's metrics."""
    step = make_train_step(model_config, inner, mesh, *loss)
    state, history = init_state(model_config, inner, mesh, seed=0), []
    for clock, batch in enumerate(batches):
        state, metrics = step(state, shard_batch(batch, mesh), learning_rate_at(inner, 10, clock))
        history.append(jax.device_get(metrics))
    return state, history
