"""The inner step of one learner: loss, gradient and inner optimizer on its mesh."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from ddiloco.arrays.blocks import Blocks, placed
from ddiloco.models.parameter import Constrain
from ddiloco.training.inner_optimizer import InnerConfig, clip_factor, make_inner_optimizer
from ddiloco.training.loss import Batch, Loss, LossSums, next_token_loss, statistics
from ddiloco.training.parameters import Parameters, abstract_parameters, logical_axes
from ddiloco.training.sharding import (
    OnMesh,
    batch_sharding,
    parameter_shardings,
    replicated,
)

Metrics = dict[str, jax.Array]


@functools.partial(jax.tree_util.register_dataclass, data_fields=("params", "opt_state"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state that an inner step reads and replaces; the learner keeps the clock."""

    params: dict[str, Any]
    opt_state: optax.OptState


def abstract_state(model_config: Any, inner: InnerConfig, mesh: Mesh) -> TrainState:
    """Shape, dtype and sharding of every array of the state; allocates nothing.

    Moments are sharded like their parameters, by whose names they are known; counters are on every device.
    """
    shapes, shardings = abstract_parameters(model_config), parameter_shardings(model_config, mesh)
    params = {name: _laid(leaf, shardings[name]) for name, leaf in shapes.items()}
    optimizer = make_inner_optimizer(inner, logical_axes(model_config))

    def laid(path: tuple[Any, ...], leaf: Any) -> jax.ShapeDtypeStruct:
        name = str(getattr(path[-1], "key", ""))
        return _laid(leaf, shardings.get(name, replicated(mesh)))

    opt_state = jax.tree_util.tree_map_with_path(laid, jax.eval_shape(optimizer.init, shapes))
    return TrainState(params, opt_state)


def _laid(leaf: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def shard_bytes(tree: Any) -> int:
    """One device's part of abstract arrays."""
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(tree)
    )


def state_shardings(model_config: Any, inner: InnerConfig, mesh: Mesh) -> TrainState:
    """The sharding of every array of the state."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model_config, inner, mesh))


def make_train_step(
    model_config: Any, inner: InnerConfig, mesh: Mesh, loss: Loss = next_token_loss
) -> jax.stages.Wrapped:
    """The jitted step `(state, batch, rate) -> (state, metrics)`; `state` is donated.

    `batch` has arrays (B, ...) from `shard_batch`, among them `weights`, int32: 1 for each target that
    counts, else 0. `rate` is the learning rate, a float32 scalar. Metrics are device
    scalars: `loss` (nats per token), `grad_norm` (before clipping), `learning_rate`, `tokens`, `skipped` (1
    if loss or gradient was not finite and the state was left as it was), and the model's statistics. Up to
    rounding, the step does not depend on `accumulation`.
    """
    axes, at = logical_axes(model_config), parameter_shardings(model_config, mesh)
    optimizer = make_inner_optimizer(inner, axes, at)
    constrain = OnMesh(mesh)

    def sums_of(params: Parameters, batch: Batch) -> LossSums:
        return loss(model_config, params, batch, inner.z_loss, constrain)

    def step(state: TrainState, batch: Batch, rate: jax.Array) -> tuple[TrainState, Metrics]:
        gradients, sums = _accumulated(sums_of, state.params, batch, inner.accumulation, constrain)
        count = jnp.maximum(sums.tokens, 1).astype(jnp.float32)
        grad_norm = optax.tree.norm(gradients) / count
        # One factor for mean and clipping, which whatever reads a gradient multiplies as it reads it.
        factor = clip_factor(inner, grad_norm) / count
        gradients = jax.tree.map(lambda leaf: factor * leaf, gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params, rate=rate)
        stepped = TrainState(optax.apply_updates(state.params, updates), opt_state)
        sound = jnp.isfinite(grad_norm) & jnp.isfinite(sums.objective)
        kept = jax.tree.map(lambda new, old: jnp.where(sound, new, old), stepped, state)
        metrics = {
            "loss": sums.nll / count,
            "grad_norm": grad_norm,
            "learning_rate": rate,
            "tokens": sums.tokens,
            "skipped": (~sound).astype(jnp.int32),
            **statistics(model_config, sums),
        }
        return kept, metrics

    shardings = state_shardings(model_config, inner, mesh)
    return jax.jit(
        step,
        in_shardings=(shardings, batch_sharding(mesh), replicated(mesh)),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnames="state",
    )


def _accumulated(
    sums_of: Callable[[Parameters, Batch], LossSums],
    params: Parameters,
    batch: Batch,
    accumulation: int,
    constrain: Constrain,
) -> tuple[Parameters, LossSums]:
    """The gradient of the summed objective, and the sums, computed in `accumulation` micro-batches."""

    def objective(params: Parameters, batch: Batch) -> tuple[jax.Array, LossSums]:
        sums = sums_of(params, batch)
        return sums.objective, sums

    gradient_of = jax.grad(objective, has_aux=True)
    if accumulation == 1:
        return gradient_of(params, batch)

    def split(rows: jax.Array) -> jax.Array:
        # Rows i, i + k, ...: each device keeps its own rows, where contiguous blocks would move.
        micro = jnp.swapaxes(rows.reshape(-1, accumulation, *rows.shape[1:]), 0, 1)
        return constrain(micro, (None, "batch", *[None] * (rows.ndim - 1)))

    def add(total: Any, micro_batch: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradient_of(params, micro_batch)), None

    micro_batches = jax.tree.map(split, dict(batch))
    first = jax.tree.map(lambda rows: rows[0], micro_batches)
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(gradient_of, params, first))
    total, _ = jax.lax.scan(add, zeros, micro_batches)
    return total


def abstract_batch(
    mesh: Mesh, rows: int, row: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding of the arrays of a batch with `rows` rows; `row` describes one."""
    sharding = batch_sharding(mesh)
    return {
        name: jax.ShapeDtypeStruct((rows, *leaf.shape), leaf.dtype, sharding=sharding)
        for name, leaf in row.items()
    }


def shard_batch(batch: Mapping[str, np.ndarray | Blocks], mesh: Mesh) -> dict[str, jax.Array]:
    """Puts a batch, or its devices' rows of it, on the mesh."""
    laid = [batch_sharding(mesh)] * len(batch)
    return dict(zip(batch, placed(tuple(batch.values()), laid), strict=True))


def checksums(tree: Any) -> dict[jax.Device, tuple[int, ...]]:
    """A checksum of the bits of each addressable device's shards; waits for them.

    It differs wherever one element does. An error in a collective shows on every device that took part.
    """
    shards: dict[jax.Device, list[jax.Array]] = collections.defaultdict(list)
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            shards[shard.device].append(shard.data)
    sums = {device: _checksum(tuple(held)) for device, held in shards.items()}
    return {device: tuple(map(int, np.asarray(words))) for device, words in sums.items()}


@jax.jit
def _checksum(arrays: tuple[jax.Array, ...]) -> jax.Array:
    """Two sums (2,) uint32 of hashes of each word and its place.

    The hashes are bijections of the word (MurmurHash3's finalizer), so that one error shows for certain;
    those of several words cancel in one of 2**64 cases.
    """
    total = jnp.zeros(2, jnp.uint32)
    for array in arrays:
        words = _words(array).reshape(-1)
        keyed = words ^ (jax.lax.iota(jnp.uint32, words.size) * jnp.uint32(0x9E3779B1))
        sums = [_mixed(keyed ^ jnp.uint32(key)).sum(dtype=jnp.uint32) for key in (0, 0x5BD1E995)]
        total = total * jnp.uint32(3) + jnp.stack(sums)
    return total


def _mixed(words: jax.Array) -> jax.Array:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = (words ^ (words >> shift)) * jnp.uint32(factor)
    return words ^ (words >> 16)


def _words(x: jax.Array) -> jax.Array:
    """The bits as uint32: a NaN equals itself, and 0 differs from -0."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * min(4, x.dtype.itemsize)}"))
    return bits.astype(jnp.uint32)
