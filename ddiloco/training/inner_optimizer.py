"""The inner optimizer: AdamW or Muon, with a learning rate by the learner's clock, not a count."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ddiloco.arrays.sharded_rows import ways
from ddiloco.config import Marks, setting
from ddiloco.models.parameter import Axes
from ddiloco.outer.stacks import is_stack

_OF_STATES = Marks(may_change="never", because="the learners' inner states have its arrays")


EPSILON = 1e-8  # added to the root of Adam's second moment; optax's default
MUON_MOMENTUM = 0.95  # decay of Muon's mean of gradients, as its authors have it


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
    b1: float = setting(0.9, "decay of Adam's first moment", at_least=0.0, below=1.0)
    b2: float = setting(0.95, "decay of Adam's second moment", at_least=0.0, below=1.0)
    mu_dtype: str = setting(
        "float32", "type in which first moments are kept", choices=("bfloat16", "float32"), **_OF_STATES
    )
    gradient_share: float | None = setting(
        None,
        "share of the present gradient in a step, beside their mean; None: 0 for Adam, Nesterov's for Muon",
        at_least=0.0,
        at_most=1.0,
    )
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


def clip_factor(config: InnerConfig, norm: jax.Array) -> jax.Array | float:
    """What gradients of this global norm are multiplied with, so that it is `clip_norm` at most."""
    return 1.0 if config.clip_norm is None else jnp.minimum(1.0, config.clip_norm / norm)


def decay_mask(params: Mapping[str, Any]) -> dict[str, bool]:
    """The parameters with weight decay: matrices, but no embedding, norm or bias."""

    def decays(name: str, axes: int) -> bool:
        return axes >= 2 and not name.endswith("/bias") and not name.startswith("embed")

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
    """AdamW (arXiv 1711.05101) of clipped gradients; `update` takes the extra argument `rate`.

    The learning rate comes from outside, so that what is compiled serves every schedule.

    Where `config.optimizer` is `muon`, that takes Adam's place for the matrices of layers; `axes` has the
    logical axes of every parameter, by which they are known, and the devices of `shardings` share them.

    `config.gradient_share` makes either momentum a quasi-hyperbolic one (arXiv 1810.06801): with a slow mean
    that is MT-DAO (arXiv 2510.05361, with one first moment).

    The clock may jump forward, as when an update from the syncer carries a later global step. The learning
    rate jumps with it; the bias correction of the moments counts the steps really taken.
    """
    scaled = optax.scale_by_adam(config.b1, config.b2, EPSILON, mu_dtype=config.mu_dtype)
    if config.gradient_share is not None:
        scaled = _with_share(scaled, config.gradient_share, config.b2)
    if config.optimizer == "muon":
        share = config.gradient_share
        scaled = muon(axes, MUON_MOMENTUM, config.mu_dtype, scaled, shardings, share)
    parts: list[optax.GradientTransformation] = [scaled]
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=decay_mask))
    parts.append(scale_by_rate())
    return optax.with_extra_args_support(optax.chain(*parts))


def _with_share(adam: optax.GradientTransformation, share: float, b2: float) -> optax.GradientTransformation:
    """Adam with this share of the present gradient in the place of its first moment."""

    def update(
        gradients: optax.Updates, state: optax.ScaleByAdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.ScaleByAdamState]:
        updates, state = adam.update(gradients, state, params)
        second = optax.tree.bias_correction(state.nu, b2, state.count)
        mixed = jax.tree.map(
            lambda u, g, v: (1 - share) * u + share * g / (jnp.sqrt(v) + EPSILON), updates, gradients, second
        )
        return mixed, state

    return optax.GradientTransformation(adam.init, update)


# Muon: the momentum of each matrix of the layers, made orthogonal.
_ITERATIONS, _COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024
_EPS = 1e-8  # added to the norm of a momentum
# Root mean square of an update of full rank before the learning rate, whatever the shape (arXiv 2502.16982,
# equation 4): Adam's, so that both parts share a learning rate.
_UPDATE_RMS = 0.2


class MuonState(NamedTuple):
    """Muon's state between steps."""

    steps: jax.Array  # taken, int32
    mu: optax.Updates  # the mean of the gradients of each matrix


def is_matrix(name: str, axes: Axes) -> bool:
    """Whether a parameter is a matrix of a layer, or a stack of these.

    A matrix leads from the model's width to other axes or back. Each layer of a stack and each expert has
    its own. Embeddings, heads, routers, norms and biases are none.

    Example:
      >>> is_matrix("layers/0:4/up", ("layer", "embed", "mlp")), is_matrix("head", ("embed", "vocab"))
      (True, False)
    """
    own = [axis for axis in axes if axis not in ("layer", "expert")]
    return "layers/" in name and len(own) >= 2 and None not in own and "embed" in own


def muon(
    axes: Mapping[str, Axes],
    momentum: float,
    mu_dtype: str,
    others: optax.GradientTransformation,
    shardings: Mapping[str, NamedSharding] | None = None,
    gradient_share: float | None = None,
) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for the matrices of layers: Nesterov's momentum, made orthogonal.

    Args:
      axes: the logical axes of every parameter.
      momentum: decay of the mean of gradients.
      mu_dtype: the type in which that mean is kept.
      others: moves all other parameters.
      shardings: of every parameter, on the mesh whose devices share the matrices; None: one device has all.
      gradient_share: that of the present gradient beside that mean; None: Nesterov's, 1 - `momentum`.
    """

    def init(params: optax.Params) -> MuonState:
        return MuonState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params, dtype=mu_dtype))

    def update(
        gradients: optax.Updates, state: MuonState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, MuonState]:
        del params
        mu = optax.tree.update_moment(gradients, state.mu, momentum, 1)
        steps = optax.safe_increment(state.steps)
        if gradient_share is not None:
            share, mean = gradient_share, optax.tree.bias_correction(mu, momentum, steps)
        else:  # without bias, like Nadam's: the gradient counts as the next step will have it
            share, mean = 1 - momentum, optax.tree.bias_correction(mu, momentum, steps + 1)
            gradients = optax.tree.bias_correction(gradients, momentum, steps)
        ahead = jax.tree.map(lambda m, g: (1 - share) * m + share * g, mean, gradients)
        whole = {name: x for name, x in ahead.items() if name in matrices}  # the rest is masked
        turned = _all_orthogonal(whole, axes, shardings)
        return {**ahead, **turned}, MuonState(steps, optax.tree.cast(mu, mu_dtype))

    matrices = {name for name, names in axes.items() if is_matrix(name, names)}
    parts = {"matrices": optax.GradientTransformation(init, update), "others": others}
    return optax.partition(
        parts, lambda params: {name: "matrices" if name in matrices else "others" for name in params}
    )


def _all_orthogonal(
    stacks: Mapping[str, jax.Array],
    axes: Mapping[str, Axes],
    shardings: Mapping[str, NamedSharding] | None,
) -> dict[str, jax.Array]:
    """Each matrix made orthogonal, and scaled to one root mean square.

    On several devices each takes some matrices whole, in one exchange there and one back: a product of what
    lies divided would be an exchange for each of the iterations. All matrices of one size are distributed
    together, since a stack has too few for all devices.
    """
    flat = {name: _flat(stack, axes[name]) for name, stack in stacks.items()}
    if shardings is None or all(sharding.num_devices == 1 for sharding in shardings.values()):
        turned = {name: _orthogonal(x) for name, x in flat.items()}
    else:
        specs = {name: _flat_spec(axes[name], shardings[name].spec) for name in flat}
        turned = _shared(flat, specs, next(iter(shardings.values())).mesh)
    return {
        name: _as_it_was(x * (_UPDATE_RMS * math.sqrt(max(x.shape[-2:]))), axes[name], stacks[name].shape)
        for name, x in turned.items()
    }


def _shared(
    flat: Mapping[str, jax.Array], specs: Mapping[str, PartitionSpec], mesh: Mesh | AbstractMesh
) -> dict[str, jax.Array]:
    """Stacks of matrices (E, L, D, F) made orthogonal, some of each size on each device."""
    groups: dict[Any, list[str]] = collections.defaultdict(list)
    for name, x in flat.items():
        groups[*x.shape[2:], specs[name]].append(name)
    found: dict[str, jax.Array] = {}
    for (*_, spec), names in groups.items():
        orthogonalize = functools.partial(_orthogonalize_shards, mesh, spec)
        on_devices = jax.shard_map(orthogonalize, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        found.update(zip(names, on_devices(*(flat[name] for name in names)), strict=True))
    return found


def _orthogonalize_shards(
    mesh: Mesh | AbstractMesh, spec: PartitionSpec, *stacks: jax.Array
) -> list[jax.Array]:
    """On each device: its parts of some stacks of one size become whole matrices, and parts again.

    Devices that divide experts or layers among them have matrices of their own to begin with; those
    with the same ones take some each. So that all have equally many, some are computed twice.
    """
    parts = [(part,) if isinstance(part, str) else part or () for part in spec]
    *_, width, rest = parts
    divided = [(names, axis) for names, axis in ((width, 1), (rest, 2)) if names]
    inside = (name for name, size in mesh.shape.items() if size > 1 and name != "slice")  # DCN is too slow
    same = tuple(name for name in inside if not any(name in part for part in parts))
    copies = ways(mesh, same)
    shares = copies * math.prod(ways(mesh, names) for names, _ in divided)
    x = jnp.concatenate([stack.reshape(-1, *stack.shape[2:]) for stack in stacks])
    number = math.ceil(len(x) / shares) * shares
    x = jnp.concatenate([x] * math.ceil(number / len(x)))[:number]
    x = jax.lax.optimization_barrier(x)  # else XLA may exchange parts of stacks that lie in different orders
    if same:
        share = number // copies
        x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(same) * share, share)
    for names, axis in divided:
        x = jax.lax.all_to_all(x, names, split_axis=0, concat_axis=axis, tiled=True)
    x = _orthogonal(x)
    for names, axis in reversed(divided):
        x = jax.lax.all_to_all(x, names, split_axis=axis, concat_axis=0, tiled=True)
    if same:
        x = jax.lax.all_gather(x, same, tiled=True)
    ends = itertools.accumulate(math.prod(stack.shape[:2]) for stack in stacks)
    return [part.reshape(s.shape) for part, s in zip(jnp.split(x, list(ends)), stacks, strict=False)]


@jax.jit  # so that it is traced once for all matrices of a shape
def _orthogonal(x: jax.Array) -> jax.Array:
    """Matrices (..., D, F) with singular values near one: the quintic iteration of Newton and Schulz."""
    a, b, c = _COEFFICIENTS
    high = x.shape[-2] > x.shape[-1]
    x = x.mT if high else x
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + _EPS)

    def iteration(_: int, x: jax.Array) -> jax.Array:
        square = x @ x.mT
        return a * x + (b * square + c * square @ square) @ x

    x = jax.lax.fori_loop(0, _ITERATIONS, iteration, x)  # unrolled, it took a fifth of the step's compilation
    return x.mT if high else x


def _order(axes: Axes) -> list[int]:
    """The axes of an array by their place in `_flat`'s, which is 3 for all that it has none for."""
    return sorted(range(len(axes)), key=lambda i: (_place(axes[i]), i))


def _place(axis: str | None) -> int:
    return {"expert": 0, "layer": 1, "embed": 2}.get(axis or "", 3)


def _flat(stack: jax.Array, axes: Axes) -> jax.Array:
    """Experts, layers, the model's width, and the rest: (E, L, D, F), where E or L may be 1."""
    sizes = [1, 1, 1, 1]
    for axis, size in zip(axes, stack.shape, strict=True):
        sizes[_place(axis)] *= size
    return stack.transpose(_order(axes)).reshape(sizes)


def _flat_spec(axes: Axes, spec: PartitionSpec) -> PartitionSpec:
    """How what `_flat` returns lies where it need not move: of axes that become one, as the first."""
    parts: dict[int, Any] = {}
    for axis, part in zip(axes, spec, strict=True):
        parts.setdefault(_place(axis), part)
    return PartitionSpec(*(parts.get(place) for place in range(4)))


def _as_it_was(flat: jax.Array, axes: Axes, shape: tuple[int, ...]) -> jax.Array:
    """Undoes `_flat`."""
    order = _order(axes)
    inverse = sorted(range(len(order)), key=lambda i: order[i])
    return flat.reshape([shape[i] for i in order]).transpose(inverse)
