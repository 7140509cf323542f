"""Three steps and an evaluation give the same numbers on one device and on eight, however laid out."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from ddiloco.models.captioner import CaptionerConfig
from ddiloco.outer.stacks import unstacked
from ddiloco.training.evaluation import evaluate, make_eval_step
from ddiloco.training.inner_optimizer import InnerConfig
from ddiloco.training.loss import caption_loss, next_token_loss
from ddiloco.training.parameters import abstract_parameters, sampled_parameters
from ddiloco.training.sharding import OnMesh, parameter_shardings
from ddiloco.training.step import shard_batch
from tests.training.batches import TINY, init_state, mesh_of, packed_batch, trained

CONFIG = dataclasses.replace(TINY, num_heads=8, num_kv_heads=8)
SCANNED = dataclasses.replace(CONFIG, scan_layers=True, remat="full", logits_chunk=10)
INNER = InnerConfig(learning_rate=1e-3, warmup_steps=0)
BATCHES = [packed_batch(seed, 16, 12, 32) for seed in range(3)]


def run(mesh, inner=INNER, config=CONFIG):
    """Parameters, metrics of each step, and the evaluation after three steps."""
    state, history = trained(config, inner, mesh, BATCHES)
    score = evaluate(config, make_eval_step(config, mesh), state.params, BATCHES, mesh)
    arrays = jax.device_get((state.params, adam_of(state).mu, adam_of(state).nu))
    return [unstacked(part) for part in arrays], history, score


@pytest.mark.parametrize(
    ("sizes", "accumulation", "settings"),
    [
        pytest.param({"data": 2, "stage": 2, "tensor": 2}, 1, {"num_layers": 2}, marks=pytest.mark.slow),
        pytest.param(
            *({"slice": 2, "data": 1, "stage": 2, "tensor": 2}, 2),
            {"stage_repeats": 2, "stage_microbatches": 4},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["stage2_tensor2", "stage2_circular_accumulated"],
)
def test_stages_agree_with_one_device(sizes, accumulation, settings):
    inner = dataclasses.replace(INNER, accumulation=accumulation)
    config = dataclasses.replace(SCANNED, **{"num_layers": 4, **settings})
    plain = dataclasses.replace(CONFIG, num_layers=config.num_layers, scan_layers=True)
    assert_agree(run(mesh_of(8, **sizes), inner, config), run(mesh_of(1), config=plain))


@pytest.mark.parametrize(
    ("config", "sizes", "accumulation"),
    [
        pytest.param(
            dataclasses.replace(SCANNED, num_kv_heads=2), {"data": 2, "context": 4}, 8, marks=pytest.mark.slow
        ),
        pytest.param(CONFIG, {"data": 1, "fsdp": 2, "context": 2, "tensor": 2}, 8, marks=pytest.mark.slow),
    ],
)
def test_devices_that_share_the_positions_of_a_row_agree_with_one(config, sizes, accumulation):
    inner = dataclasses.replace(INNER, accumulation=accumulation)
    plain = dataclasses.replace(config, scan_layers=False, remat="none", logits_chunk=None)
    assert_agree(run(mesh_of(8, **sizes), inner, config), run(mesh_of(1), config=plain))


def test_devices_that_share_the_positions_of_a_row_never_have_all_of_them_of_every_head():
    """What each holds of a row shrinks with their number, but for keys and values, of which there are few."""
    mesh = mesh_of(8, data=1, context=8)
    rows = {name: array[:1] for name, array in packed_batch(0, 1, 640, 32).items()}
    shardings = parameter_shardings(CONFIG, mesh)
    params = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[name])
        for name, leaf in abstract_parameters(CONFIG).items()
    }

    def loss(params, batch):
        return next_token_loss(CONFIG, params, batch, constrain=OnMesh(mesh)).objective

    text = jax.jit(jax.grad(loss), out_shardings=shardings).lower(params, shard_batch(rows, mesh)).compile()
    text = text.as_text()
    assert "all-to-all" in text
    for whole in ("f32[1,640,16]", "f32[640,16]", "f32[1,640,8,4]", "f32[640,32]"):
        assert whole not in text, "of the residual stream, the heads and the logits"


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 2, "stage": 2, "tensor": 2}, {"data": 4, "context": 2}])
def test_the_kernel_of_attention_runs_inside_of_stages_and_where_positions_are_shared(sizes):
    batch, mesh = packed_batch(0, 4, 128, 32), mesh_of(8, **sizes)
    params = dict(sampled_parameters(CONFIG, 0))

    def loss(params, config, mesh):
        return next_token_loss(config, params, batch, constrain=OnMesh(mesh)).objective

    gradient = jax.jit(jax.value_and_grad(loss), static_argnums=(1, 2))
    staged = dataclasses.replace(SCANNED, attention="splash")
    for ours, expected in zip(
        jax.tree.leaves(gradient(params, staged, mesh)),
        jax.tree.leaves(gradient(params, CONFIG, mesh_of(1))),
        strict=True,
    ):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("model", ["dense", pytest.param("captioner", marks=pytest.mark.slow)])
def test_no_device_looks_up_the_tokens_of_another_copy_of_the_model(model):
    config, mesh = dataclasses.replace(CONFIG, num_layers=1, vocab_size=400), mesh_of(8, data=2, fsdp=4)
    batch, loss_of = BATCHES[0], next_token_loss
    if model == "captioner":
        config, loss_of = CaptionerConfig(**dataclasses.asdict(config)), caption_loss
        batch = {**batch, "image": np.zeros((16, 12, 32, 1), np.uint8)}
    shardings = parameter_shardings(config, mesh)
    params = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[name])
        for name, leaf in abstract_parameters(config).items()
    }

    def loss(params, batch):
        return loss_of(config, params, batch, constrain=OnMesh(mesh)).objective

    gradient = jax.jit(jax.grad(loss), out_shardings=shardings)
    text = gradient.lower(params, shard_batch(batch, mesh)).compile().as_text()
    assert re.search(r"f32\[(8,12|96,1),4\]", text)  # of the rows of one copy a quarter of the width
    assert not re.search(r"f32\[(16,12|192,1),", text)


def adam_of(state):
    (adam,) = [part for part in state.opt_state if hasattr(part, "mu")]
    return adam


@pytest.fixture(scope="module")
def alone():
    return run(mesh_of(1))


@pytest.mark.parametrize(
    ("config", "sizes", "accumulation"),
    [
        pytest.param(CONFIG, {"data": 8}, 1, marks=pytest.mark.slow),
        pytest.param(CONFIG, {"data": 1, "tensor": 8}, 1, marks=pytest.mark.slow),
        pytest.param(CONFIG, {"data": 2, "fsdp": 2, "tensor": 2}, 1, marks=pytest.mark.slow),
        pytest.param(SCANNED, {"data": 1, "expert": 2, "tensor": 4}, 1, marks=pytest.mark.slow),
        pytest.param(SCANNED, {"slice": 2, "data": 1, "fsdp": 2, "tensor": 2}, 2, marks=pytest.mark.slow),
        pytest.param(SCANNED, {"data": 2, "fsdp": 4}, 2, marks=pytest.mark.slow),
    ],
    ids=[
        "data8",
        "tensor8",
        "data2_fsdp2_tensor2",
        "scanned_expert2_tensor4",
        "scanned_slice2_fsdp2_tensor2_accumulated",
        "scanned_data2_fsdp4_accumulated",
    ],
)
def test_eight_devices_agree_with_one(alone, config, sizes, accumulation):
    inner = dataclasses.replace(INNER, accumulation=accumulation)
    assert_agree(run(mesh_of(8, **sizes), inner, config), alone)


def assert_agree(found, alone):
    expected_arrays, expected_history, expected_score = alone
    arrays, history, score = found
    for metrics, expected in zip(history, expected_history, strict=True):
        assert metrics["tokens"] == expected["tokens"]
        for name in ("loss", "grad_norm", "learning_rate"):
            np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5, err_msg=name)
    for (path, leaf), expected in zip(
        jax.tree.leaves_with_path(arrays), jax.tree.leaves(expected_arrays), strict=True
    ):
        np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=1e-5, err_msg=jax.tree_util.keystr(path))
    assert score.loss == pytest.approx(expected_score.loss, rel=1e-6)


def test_moments_lie_like_their_parameters():
    mesh = mesh_of(8, data=1, fsdp=4, tensor=2)
    state = init_state(CONFIG, INNER, mesh, seed=0)
    layouts = {name: leaf.sharding for name, leaf in state.params.items()}
    adam = adam_of(state)
    for moments in (adam.mu, adam.nu):
        assert {name: leaf.sharding for name, leaf in moments.items()} == layouts
    assert adam.mu["layers/0/mlp/up/kernel"].addressable_shards[0].data.shape == (4, 16)
