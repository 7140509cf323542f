"""Muon for the matrices of layers: against float64, against Adam for the rest, and on meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ddiloco.models.captioner import CaptionerConfig
from ddiloco.models.moe import MoEConfig
from ddiloco.models.vit import ViTConfig
from ddiloco.outer.stacks import unstacked
from ddiloco.training.inner_optimizer import (
    InnerConfig,
    is_matrix,
    learning_rate_at,
    make_inner_optimizer,
    muon,
)
from ddiloco.training.parameters import logical_axes
from ddiloco.training.sharding import partition
from tests.training.batches import TINY, init_state, mesh_of, packed_batch, trained

INNER = InnerConfig(optimizer="muon", learning_rate=1e-3, warmup_steps=0)
BATCHES = [packed_batch(seed, 16, 12, 32) for seed in range(3)]


def orthogonal(matrix):
    """Five steps of Newton and Schulz's quintic iteration, as published by Jordan et al., in float64."""
    wide = matrix / np.linalg.norm(matrix)
    wide = wide.T if wide.shape[0] > wide.shape[1] else wide
    for _ in range(5):
        square = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * square + 2.0315 * square @ square) @ wide
    return wide if wide.shape == matrix.shape else wide.T


@pytest.mark.parametrize("share", [None, 0.3])
@pytest.mark.parametrize(
    ("axes", "shape", "flat"),
    [
        (("embed", "mlp"), (8, 12), (8, 12)),
        (("mlp", "embed"), (12, 8), (12, 8)),
        (("embed", "heads", "head_dim"), (8, 2, 3), (8, 6)),
        (("heads", "head_dim", "embed"), (2, 3, 8), (6, 8)),
    ],
)
def test_steps_are_those_of_float64(axes, shape, flat, share):
    rng = np.random.default_rng(0)
    optimizer = muon({"layers/0/w": axes}, 0.9, "float32", optax.identity(), gradient_share=share)
    state, mean = optimizer.init({"layers/0/w": jnp.zeros(shape)}), np.zeros(flat)
    for count in range(1, 4):
        gradient = rng.normal(size=shape)
        updates, state = optimizer.update({"layers/0/w": jnp.asarray(gradient, jnp.float32)}, state)
        gradient = gradient.reshape(flat)
        mean = 0.9 * mean + 0.1 * gradient
        if share is None:
            ahead = 0.9 * mean / (1 - 0.9 ** (count + 1)) + 0.1 * gradient / (1 - 0.9**count)
        else:
            ahead = (1 - share) * mean / (1 - 0.9**count) + share * gradient
        expected = 0.2 * np.sqrt(max(flat)) * orthogonal(ahead)
        np.testing.assert_allclose(np.reshape(updates["layers/0/w"], flat), expected, rtol=1e-4, atol=1e-5)
    # The iteration brings singular values near to one, not to it.
    assert np.sqrt(np.mean(np.square(updates["layers/0/w"]))) == pytest.approx(0.2, rel=0.3)


def test_what_is_no_matrix_of_a_layer_goes_by_adam():
    params = {
        "embed/embedding": jnp.ones((4, 3)),
        "layers/0/norm/scale": jnp.ones(3),
        "layers/0/w": jnp.ones((3, 4)),
    }
    axes = {
        "embed/embedding": ("vocab", "embed"),
        "layers/0/norm/scale": ("embed",),
        "layers/0/w": ("embed", "mlp"),
    }
    gradients = {name: jnp.arange(1.0, 1 + leaf.size).reshape(leaf.shape) for name, leaf in params.items()}
    found = {}
    for kind in ("adamw", "muon"):
        optimizer = make_inner_optimizer(dataclasses.replace(INNER, optimizer=kind), axes)
        state = optimizer.init(params)
        for clock in range(3):
            found[kind], state = optimizer.update(
                gradients, state, params, rate=learning_rate_at(INNER, 10, clock)
            )
    differing = {name for name in params if not np.array_equal(found["adamw"][name], found["muon"][name])}
    assert differing == {"layers/0/w"}


def test_each_row_of_a_stack_and_each_expert_is_a_matrix_of_its_own():
    rng = np.random.default_rng(1)
    of_layers = rng.normal(size=(3, 2, 4, 5)).astype(np.float32)  # layers, experts
    axes = ("layer", "expert", "embed", "mlp")
    stack = {"layers/0:3/up": jnp.asarray(of_layers)}
    single = {f"layers/{i}/up/{e}": jnp.asarray(of_layers[i, e]) for i in range(3) for e in range(2)}
    together = muon({"layers/0:3/up": axes}, 0.9, "float32", optax.identity())
    apart = muon(dict.fromkeys(single, ("embed", "mlp")), 0.9, "float32", optax.identity())
    updates, _ = together.update(stack, together.init(stack))
    expected, _ = apart.update(single, apart.init(single))
    for name, update in expected.items():
        _, layer, _, expert = name.split("/")
        np.testing.assert_allclose(
            updates["layers/0:3/up"][int(layer), int(expert)], update, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize(
    "config", [TINY, MoEConfig(), ViTConfig(), CaptionerConfig()], ids=lambda c: type(c).__name__
)
def test_matrices_of_every_model_are_those_of_its_layers(config):
    matrices = [name for name, axes in logical_axes(config).items() if is_matrix(name, axes)]
    assert {
        "attention/query/kernel",
        "attention/key/kernel",
        "attention/value/kernel",
        "attention/out/kernel",
    } < {name.split("/", 2)[2] for name in matrices}
    assert not any(word in name for name in matrices for word in ("norm", "bias", "router", "embed", "head/"))


def run(mesh, config):
    state, history = trained(config, INNER, mesh, BATCHES)
    return unstacked(jax.device_get(state.params)), history[-1]["loss"]


@pytest.fixture(scope="module")
def alone():
    return run(mesh_of(1), TINY)


@pytest.mark.parametrize(
    ("sizes", "scan"),
    [
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, False, marks=pytest.mark.slow),
        pytest.param({"data": 1, "fsdp": 8}, True, marks=pytest.mark.slow),
    ],
)
def test_eight_devices_agree_with_one(alone, sizes, scan):
    params, loss = run(mesh_of(8, **sizes), dataclasses.replace(TINY, scan_layers=scan))
    assert loss == pytest.approx(alone[1], rel=1e-5)
    for name, expected in alone[0].items():
        np.testing.assert_allclose(params[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)


SIZES = {"embed": 32, "mlp": 64, "heads": 4, "kv_heads": 2, "head_dim": 8, "expert": 4}
AXES = {
    "layers/0:4/up": ("layer", "embed", "mlp"),
    "layers/0:4/down": ("layer", "mlp", "embed"),
    "layers/0:4/q": ("layer", "embed", "heads", "head_dim"),
    "layers/0:4/o": ("layer", "heads", "head_dim", "embed"),
    "layers/4/up": ("embed", "mlp"),
    "layers/5:7/experts": ("layer", "expert", "embed", "mlp"),
    "layers/5:7/norm": ("layer", "embed"),
}
# Each device has the rows of one stack, which XLA once exchanged in another order than those of the next.
SIX = {name.replace("0:4", "0:6"): axes for name, axes in AXES.items() if name[9:] in ("4/up", "4/down")}
SIX["layers/0:6/gate"] = SIX["layers/0:6/up"]
KEYS = {"layers/0:4/k": ("layer", "embed", "kv_heads", "head_dim")}


def compiled_update(axes, mesh, **lying):
    """Muon's update of gradients that lie like parameters, its result likewise; and the gradients."""
    rng = np.random.default_rng(2)
    gradients = {}
    for name, of_array in axes.items():
        begin, _, end = name.split("/")[1].partition(":")
        layers = int(end) - int(begin) if end else 1
        shape = tuple(layers if axis == "layer" else SIZES[axis] for axis in of_array)
        gradients[name] = jnp.asarray(rng.normal(size=shape), jnp.float32)
    laid = {name: partition(mesh, axes[name], leaf.shape) for name, leaf in gradients.items()}
    laid |= {name: NamedSharding(mesh, spec) for name, spec in lying.items()}
    gradients = jax.device_put(gradients, laid)
    optimizer = muon(axes, 0.9, "float32", optax.identity(), laid)
    update = jax.jit(lambda x: optimizer.update(x, optimizer.init(x))[0], out_shardings=laid)
    return update.lower(gradients).compile(), gradients


@pytest.mark.parametrize(
    ("axes", "sizes", "lying"),
    [
        pytest.param(AXES, {"data": 1, "fsdp": 8}, {}, marks=pytest.mark.slow),
        (AXES, {"data": 2, "fsdp": 2, "tensor": 2}, {}),
        pytest.param(AXES, {"data": 1, "stage": 2, "fsdp": 2, "expert": 2}, {}, marks=pytest.mark.slow),
        pytest.param(SIX, {"data": 1, "stage": 2, "fsdp": 4}, {}, marks=pytest.mark.slow),
        pytest.param(SIX, {"slice": 2, "data": 1, "fsdp": 4}, {}, marks=pytest.mark.slow),
        # As parameters lie that have too few heads for `tensor`.
        (KEYS, {"data": 1, "fsdp": 2, "tensor": 4}, {"layers/0:4/k": (None, ("fsdp", "tensor"), None, None)}),
    ],
    ids=str,
)
def test_devices_share_the_matrices(axes, sizes, lying):
    alone, gradients = compiled_update(axes, mesh_of(1))
    lying = {name: PartitionSpec(*spec) for name, spec in lying.items()}
    shared, laid = compiled_update(axes, mesh_of(8, **sizes), **lying)
    expected, found = alone(gradients), shared(laid)
    for name, update in expected.items():
        np.testing.assert_allclose(found[name], update, rtol=1e-4, atol=1e-5, err_msg=name)
    # Of 4 matrices or more of a size each of 8 devices takes an eighth, rounded up.
    assert shared.cost_analysis()["flops"] < 0.28 * alone.cost_analysis()["flops"]
    # Nobody gathers what lies divided: only copies of the model tell each other.
    assert ("all-gather(" in shared.as_text()) == (sizes["data"] > 1)


def test_momentum_lies_like_its_parameter_and_is_kept_once():
    state = init_state(TINY, INNER, mesh_of(8, data=1, fsdp=4, tensor=2), seed=0)
    (parts,) = [part.inner_states for part in state.opt_state if hasattr(part, "inner_states")]
    matrices = parts["matrices"].inner_state
    others = parts["others"].inner_state

    def kept(moments) -> set[str]:
        return {name for name, leaf in moments.items() if not isinstance(leaf, optax.MaskedNode)}

    name = "layers/0/mlp/up/kernel"
    assert matrices.mu[name].sharding == state.params[name].sharding
    assert kept(others.mu) == kept(others.nu) == state.params.keys() - kept(matrices.mu)
