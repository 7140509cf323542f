"""The mixture-of-experts decoder: the dense decoder with a choice of experts by token in place of the MLP.

Suffixes as in `ddiloco.models.dense`, and: A experts of one token, S = L A choices of a row, E experts,
C places of an expert for one row's tokens, F width of an expert, N = B L tokens.

Tokens compete for places with those of their own row only, and the balance loss is computed by row. So a
row's logits, penalty and counts do not depend on other rows, micro-batches, meshes or the number of devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ddiloco.config import setting
from ddiloco.models import dense, stack
from ddiloco.models.attention import Attend
from ddiloco.models.model import Model, Output
from ddiloco.models.parameter import Constrain, Normal, parameter, unconstrained

Counts = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class MoEConfig(dense.DenseConfig):
    """The shape of a mixture-of-experts decoder; `mlp_dim` is the width of the MLP in the dense layers."""

    num_experts: int = setting(8, "experts in a layer", at_least=2)
    experts_per_token: int = setting(2, "experts that each token chooses", at_least=1)
    expert_dim: int = setting(176, "width of one expert's gated MLP", at_least=1)
    capacity_factor: float | None = setting(
        1.5,
        "places of each expert for a row's tokens over its fair share, the later tokens are dropped; "
        "None: no token is dropped",
        above=0.0,
    )
    shared_expert_dim: int = setting(0, "width of an expert that all tokens pass beside; 0: none", at_least=0)
    dense_layers: int = setting(0, "first layers that have an MLP instead of experts", at_least=0)
    normalize_gates: bool = setting(True, "the gates of a token's experts add up to 1")
    balance_weight: float = setting(0.01, "weight of a layer's load-balancing loss", at_least=0.0)
    router_z_weight: float = setting(0.001, "weight of a layer's router z-loss", at_least=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token: is {self.experts_per_token}, but must be at most "
                f"num_experts {self.num_experts}"
            )
        if self.experts_per_token == 1 and self.normalize_gates:
            raise ValueError(
                "normalize_gates: is True, but with experts_per_token 1 every gate would be 1 "
                "and the router learn nothing from the loss"
            )
        if self.dense_layers >= self.num_layers:
            raise ValueError(
                f"dense_layers: is {self.dense_layers}, but must be below num_layers {self.num_layers}"
            )
        self.check_repeats("dense_layers", self.dense_layers)

    def places(self, length: int) -> int:
        """C, the tokens of a row of this length that an expert takes at most; all, where none is dropped."""
        if self.capacity_factor is None:
            return length
        share = self.capacity_factor * self.experts_per_token * length / self.num_experts
        return min(length, math.ceil(share))


class Routing(NamedTuple):
    """The experts chosen by the tokens, best first, with weights."""

    experts_BxLxA: jax.Array  # int32
    gates_BxLxA: jax.Array  # float32; of padding 0
    logits_BxLxE: jax.Array  # float32


class Router(nnx.Module):
    """Chooses each token's experts by a linear map, always in float32 (Switch, arXiv 2101.03961)."""

    def __init__(self, config: MoEConfig, rngs: nnx.Rngs) -> None:
        c = config
        # Near-even at first: a tenth of the usual deviation, as the Switch transformer has it.
        stddev = 0.1 * c.model_dim**-0.5
        self.kernel = parameter(rngs, (c.model_dim, c.num_experts), ("embed", None), Normal(stddev))
        self.experts_per_token = c.experts_per_token
        self.normalize_gates = c.normalize_gates

    def __call__(self, x_BxLxD: jax.Array, counted_BxL: jax.Array) -> Routing:
        wide, highest = x_BxLxD.astype(jnp.float32), jax.lax.Precision.HIGHEST
        logits_BxLxE = jnp.einsum("bld,de->ble", wide, self.kernel[...], precision=highest)
        best_BxLxA, experts_BxLxA = jax.lax.top_k(jax.nn.softmax(logits_BxLxE), self.experts_per_token)
        if self.normalize_gates:
            best_BxLxA = best_BxLxA / jnp.sum(best_BxLxA, axis=-1, keepdims=True)
        return Routing(experts_BxLxA, best_BxLxA * counted_BxL[..., None], logits_BxLxE)


def place_of_choices(experts_BxS: jax.Array, counted_BxS: jax.Array, num_experts: int) -> jax.Array:
    """The number of earlier counted choices of the same expert in the row, (B, S) int32.

    Later tokens change no place, so that the model stays causal.
    """
    chosen_BxSxE = jax.nn.one_hot(experts_BxS, num_experts, dtype=jnp.int32) * counted_BxS[..., None]
    earlier_BxSxE = jnp.cumsum(chosen_BxSxE, axis=1) - chosen_BxSxE
    return jnp.sum(earlier_BxSxE * chosen_BxSxE, axis=-1)


class Experts(nnx.Module):
    """Gated MLPs, of which each token passes those that its routing names."""

    def __init__(self, config: MoEConfig, rngs: nnx.Rngs) -> None:
        c = config
        stddev, down_stddev = c.model_dim**-0.5, c.expert_dim**-0.5 / math.sqrt(2 * c.num_layers)
        shape, axes = (c.num_experts, c.model_dim, c.expert_dim), ("expert", "embed", "mlp")
        self.gate = parameter(rngs, shape, axes, Normal(stddev))
        self.up = parameter(rngs, shape, axes, Normal(stddev))
        self.down = parameter(
            rngs, (c.num_experts, c.expert_dim, c.model_dim), ("expert", "mlp", "embed"), Normal(down_stddev)
        )
        self.config = c
        self.activation = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu}[c.activation]

    def __call__(
        self, x_BxLxD: jax.Array, routing: Routing, counted_BxL: jax.Array, constrain: Constrain
    ) -> tuple[jax.Array, jax.Array]:
        """The experts' gated sum (B, L, D), and the number of dropped choices, a float32 scalar."""
        if self.config.capacity_factor is None:
            return self._dropless(x_BxLxD, routing, constrain), jnp.zeros((), jnp.float32)
        return self._with_capacity(x_BxLxD, routing, counted_BxL, constrain)

    def _with_capacity(
        self, x_BxLxD: jax.Array, routing: Routing, counted_BxL: jax.Array, constrain: Constrain
    ) -> tuple[jax.Array, jax.Array]:
        """Each expert's places are filled from every row, in the order of the tokens."""
        (rows, length, width), c = x_BxLxD.shape, self.config
        places = c.places(length)
        experts_BxS = routing.experts_BxLxA.reshape(rows, -1)
        counted_BxS = jnp.repeat(counted_BxL, c.experts_per_token, axis=1)
        place_BxS = place_of_choices(experts_BxS, counted_BxS, c.num_experts)
        nowhere = c.num_experts * places
        taken_BxS = counted_BxS & (place_BxS < places)
        slot_BxS = jnp.where(taken_BxS, experts_BxS * places + place_BxS, nowhere)
        token_S = jnp.arange(length * c.experts_per_token) // c.experts_per_token

        def gather(x_LxD: jax.Array, slot_S: jax.Array) -> jax.Array:
            # An empty place repeats token 0; its output is never read.
            token_EC = jnp.zeros(nowhere, jnp.int32).at[slot_S].set(token_S, mode="drop")
            return x_LxD[token_EC]

        def scatter(y_ECxD: jax.Array, slot_S: jax.Array) -> jax.Array:
            return y_ECxD.at[slot_S].get(mode="fill", fill_value=0)

        x_BxExCxD = jax.vmap(gather)(x_BxLxD, slot_BxS).reshape(rows, c.num_experts, places, width)
        layout = ("expert", "batch", None, None)  # where rows lie over `expert`, this is the all-to-all
        x_ExBxCxD = constrain(jnp.swapaxes(x_BxExCxD, 0, 1), layout)
        gate, up, down = self._kernels()
        inner = self.activation(jnp.einsum("ebcd,edf->ebcf", x_ExBxCxD, gate))
        inner = inner * jnp.einsum("ebcd,edf->ebcf", x_ExBxCxD, up)
        y_ExBxCxD = constrain(jnp.einsum("ebcf,efd->ebcd", inner, down), layout)
        y_BxECxD = jnp.swapaxes(y_ExBxCxD, 0, 1).reshape(rows, nowhere, width)
        y_BxSxD = jax.vmap(scatter)(constrain(y_BxECxD, ("batch", None, None)), slot_BxS)
        dropped = jnp.sum(counted_BxS & ~taken_BxS, dtype=jnp.float32)
        return gated_sum(y_BxSxD, routing.gates_BxLxA).astype(x_BxLxD.dtype), dropped

    def _dropless(self, x_BxLxD: jax.Array, routing: Routing, constrain: Constrain) -> jax.Array:
        """Each device sorts the choices of its own rows by expert, and all experts' kernels come to it.

        On CPU, XLA computes every expert for every choice: correct, but E times the work.
        """
        mesh, kernels = constrain.mesh, self._kernels()
        choices = routing.experts_BxLxA, routing.gates_BxLxA
        if mesh is None:
            return self._sorted(x_BxLxD, *choices, *kernels).astype(x_BxLxD.dtype)
        rows = constrain.spec(("batch", None, None), x_BxLxD.shape)
        wide, narrow = (
            constrain.spec(axes, kernel.shape)
            for axes, kernel in (((None, None, "mlp"), kernels[0]), ((None, "mlp", None), kernels[2]))
        )

        def on_device(*arrays: jax.Array) -> jax.Array:
            summed_BxLxD = self._sorted(*arrays)
            return summed_BxLxD if wide[2] is None else jax.lax.psum(summed_BxLxD, wide[2])

        in_specs = (rows, rows, rows, wide, wide, narrow)
        shards = jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=rows, check_vma=False)
        return shards(x_BxLxD, *choices, *kernels).astype(x_BxLxD.dtype)

    def _sorted(
        self,
        x_BxLxD: jax.Array,
        experts_BxLxA: jax.Array,
        gates_BxLxA: jax.Array,
        gate: jax.Array,
        up: jax.Array,
        down: jax.Array,
    ) -> jax.Array:
        """The gated sum, float32: choices pass matmuls of ragged groups, one for each expert."""
        experts_M = experts_BxLxA.reshape(-1)
        order_M = jnp.argsort(experts_M, stable=True)
        sizes_E = jnp.bincount(experts_M, length=self.config.num_experts)
        x_MxD = x_BxLxD.reshape(-1, x_BxLxD.shape[-1])[order_M // self.config.experts_per_token]
        inner = self.activation(jax.lax.ragged_dot(x_MxD, gate, sizes_E))
        inner = inner * jax.lax.ragged_dot(x_MxD, up, sizes_E)
        y_MxD = jax.lax.ragged_dot(inner, down, sizes_E)[jnp.argsort(order_M)]
        return gated_sum(y_MxD, gates_BxLxA)

    def _kernels(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        gate, up, down = (x[...].astype(self.config.compute_dtype) for x in (self.gate, self.up, self.down))
        return gate, up, down


def gated_sum(y: jax.Array, gates_BxLxA: jax.Array) -> jax.Array:
    """The sum of the choices' outputs (B L A, D), in any shape, by their gates; (B, L, D) float32."""
    y_BxLxAxD = y.reshape(*gates_BxLxA.shape, y.shape[-1])
    return jnp.einsum("blad,bla->bld", y_BxLxAxD.astype(jnp.float32), gates_BxLxA)


def router_counts(routing: Routing, counted_BxL: jax.Array) -> Counts:
    """Float32 sums over the tokens that count, of what a layer's router did with them.

    `load` (E): choices of each expert, before any is dropped. `entropy`: of the router's distribution, nats.
    `router_z`: squared log-normaliser (ST-MoE, arXiv 2202.08906, section 3). `routed`: the tokens. `balance`:
    of each row, its tokens times E sum_e f_e P_e, with f_e the share of expert e in the row's choices and P_e
    its mean probability (Switch transformer, arXiv 2101.03961, section 2.2). That is 1 a token where all is
    even, and E where each token has one choice and all choose the same. Only P_e has a gradient.
    """
    num_experts, weights_BxL = routing.logits_BxLxE.shape[-1], counted_BxL.astype(jnp.float32)
    normaliser_BxL = jax.nn.logsumexp(routing.logits_BxLxE, axis=-1)
    log_probability_BxLxE = routing.logits_BxLxE - normaliser_BxL[..., None]
    probability_BxLxE = jnp.exp(log_probability_BxLxE)
    chosen_BxLxE = jnp.sum(jax.nn.one_hot(routing.experts_BxLxA, num_experts), axis=2)
    load_BxE = jnp.einsum("ble,bl->be", chosen_BxLxE, weights_BxL)
    mass_BxE = jnp.einsum("ble,bl->be", probability_BxLxE, weights_BxL)
    choices_B = jnp.maximum(jnp.sum(load_BxE, axis=-1), 1)
    entropy_BxL = -jnp.sum(probability_BxLxE * log_probability_BxLxE, axis=-1)
    return {
        "load": jnp.sum(load_BxE, axis=0),
        "entropy": jnp.sum(entropy_BxL * weights_BxL),
        "router_z": jnp.sum(normaliser_BxL**2 * weights_BxL),
        "balance": num_experts * jnp.sum(jnp.sum(load_BxE * mass_BxE, axis=-1) / choices_B),
        "routed": jnp.sum(weights_BxL),
    }


class MoE(nnx.Module):
    """Router, experts, and the shared expert where there is one."""

    def __init__(self, config: MoEConfig, rngs: nnx.Rngs) -> None:
        self.router = Router(config, rngs)
        self.experts = Experts(config, rngs)
        self.has_shared = config.shared_expert_dim > 0
        if self.has_shared:
            shape = dataclasses.replace(config, mlp_dim=config.shared_expert_dim)
            self.shared = dense.GatedMLP(shape, rngs)

    def __call__(
        self, x_BxLxD: jax.Array, counted_BxL: jax.Array, constrain: Constrain
    ) -> tuple[jax.Array, Counts]:
        routing = self.router(x_BxLxD, counted_BxL)
        y_BxLxD, dropped = self.experts(x_BxLxD, routing, counted_BxL, constrain)
        if self.has_shared:
            y_BxLxD = y_BxLxD + self.shared(x_BxLxD)
        return y_BxLxD, {**router_counts(routing, counted_BxL), "dropped": dropped}


class _Layer(dense.Layer):
    """Attention, then the MLP or the experts, each added to the residual stream after a norm of its input."""

    def __init__(self, config: MoEConfig, number: int, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs, dense.GatedMLP if number < config.dense_layers else MoE)

    def __call__(  # type: ignore[override]
        self,
        x_BxLxD: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        attend: Attend,
        counted_BxL: jax.Array,
        constrain: Constrain,
    ) -> tuple[jax.Array, Counts]:
        x_BxLxD = x_BxLxD + self.attention(self.attention_norm(x_BxLxD), angles, attend)
        normed_BxLxD = self.mlp_norm(x_BxLxD)
        if isinstance(self.mlp, dense.GatedMLP):
            return x_BxLxD + self.mlp(normed_BxLxD), {}
        y_BxLxD, counts = self.mlp(normed_BxLxD, counted_BxL, constrain)
        return x_BxLxD + y_BxLxD, counts


class MoEDecoder(dense.Decoder):
    """The whole model: token ids in, float32 logits of the next token, penalty and router counts out."""

    config: MoEConfig

    def new_layers(self, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        """The layers, as `stack.layers` makes them: those with an MLP, then those with experts."""
        c, make = self.config, lambda number: _Layer(self.config, number, rngs)
        kinds = (0, c.dense_layers), (c.dense_layers, c.num_layers)
        return {name: layer for kind in kinds for name, layer in stack.layers(make, *kind, c).items()}

    def __call__(  # type: ignore[override]
        self,
        inputs_BxL: jax.Array,
        positions_BxL: jax.Array,
        segments_BxL: jax.Array,
        constrain: Constrain = unconstrained,
    ) -> Output:
        """Logits (B, L, V), the routers' weighted losses, and their counts over the layers with experts.

        Padding, of segment 0, is routed nowhere: it takes no places and is not counted.
        """

        x_BxLxD, aux = self.through_layers(inputs_BxL, positions_BxL, segments_BxL, constrain)
        sums = jax.tree.map(lambda *parts: jnp.concatenate(parts), *(counts for counts in aux if counts))
        penalty = self.config.balance_weight * jnp.sum(sums["balance"])
        penalty = penalty + self.config.router_z_weight * jnp.sum(sums["router_z"])
        return Output(self.logits(x_BxLxD, constrain), penalty, {**sums, "penalty": penalty})

    def call(
        self,
        angles: tuple[jax.Array, jax.Array],
        attend: Attend,
        constrain: Constrain,
        counted_BxL: jax.Array | None = None,
    ) -> stack.Call:
        """What calls a layer on some rows, and gives its router's counts beside."""

        def call(layer: _Layer, x_BxLxD: jax.Array) -> tuple[jax.Array, Counts]:
            counted = jnp.ones(x_BxLxD.shape[:2], bool) if counted_BxL is None else counted_BxL
            x_BxLxD, counts = layer(x_BxLxD, angles, attend, counted, constrain)
            return constrain(x_BxLxD, ("batch", "length", None)), counts

        return call


def sampling(config: MoEConfig) -> MoEConfig:
    """Drops no choice: which ones a capacity leaves out depends on how many tokens pass at a time."""
    return dataclasses.replace(config, capacity_factor=None)


def statistics(sums: Mapping[str, Any], tokens: Any) -> dict[str, Any]:
    """Metrics of the routers, from `router_counts` stacked over the layers with experts.

    `penalty`: nats per target that counts. `balance`, `router_z`, `router_entropy` (nats, at most ln E): mean
    over layers and tokens. `dropped_share`: of all choices. `max_load`, `min_load`: choices of the most and
    the least chosen expert of any layer over the even share. `max_load/0` and so on: the same by layer,
    counted from the first that has experts.
    """
    routed, load = sums["routed"].sum(), sums["load"]
    routed = routed + (routed == 0)
    choices = load.sum(axis=-1, keepdims=True)
    relative = load * load.shape[-1] / (choices + (choices == 0))
    return {
        "penalty": sums["penalty"] / (tokens + (tokens == 0)),
        "balance": sums["balance"].sum() / routed,
        "router_z": sums["router_z"].sum() / routed,
        "router_entropy": sums["entropy"].sum() / routed,
        "dropped_share": sums["dropped"].sum() / (choices.sum() + (choices.sum() == 0)),
        "max_load": relative.max(),
        "min_load": relative.min(),
        **{f"max_load/{m}": relative[m].max() for m in range(len(relative))},
    }


def idle_parameters(config: MoEConfig) -> int:
    """Number of parameters in experts that a token does not pass."""
    c = config
    idle = (c.num_experts - c.experts_per_token) * 3 * c.model_dim * c.expert_dim
    return (c.num_layers - c.dense_layers) * idle


def flops_per_token(config: MoEConfig, seq_len: int) -> float:
    """Floating-point operations of one training step for each token, as `dense.flops_per_token` counts them.

    Of the experts those that a token chooses; empty and dropped places are not counted.
    """
    c = config
    dense_flops = dense.flops_per_token(c, seq_len)  # with an MLP in every layer
    mlps = c.num_layers - c.dense_layers
    width = c.experts_per_token * c.expert_dim + c.shared_expert_dim - c.mlp_dim
    return dense_flops + 6.0 * mlps * c.model_dim * (3 * width + c.num_experts)


MODEL = Model(MoEConfig, MoEDecoder, flops_per_token, statistics, idle_parameters, sampling=sampling)
