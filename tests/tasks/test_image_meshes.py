"""Models of images give the same numbers on one device and on eight, however laid out."""

import dataclasses

import jax
import numpy as np
import pytest

from ddiloco.outer.stacks import unstacked
from ddiloco.training.evaluation import evaluate, make_eval_step
from ddiloco.training.inner_optimizer import InnerConfig
from ddiloco.training.loss import caption_loss, label_loss
from tests.models import test_captioner, test_vit
from tests.training.batches import mesh_of, trained

INNER = InnerConfig(learning_rate=1e-3, warmup_steps=0)
VIT = dataclasses.replace(test_vit.TINY, num_classes=8, num_layers=1)
CAPTIONER = dataclasses.replace(test_captioner.TINY, num_layers=1)
CASES = {
    "vit": (VIT, label_loss, [test_vit.labelled_images(VIT, 16, seed) for seed in range(2)]),
    "captioner": (
        CAPTIONER,
        caption_loss,
        [test_captioner.captioned_images(16, 5, seed) for seed in range(2)],
    ),
}


def run(name, mesh, accumulation=1, **layers):
    config, loss, batches = CASES[name]
    config = dataclasses.replace(config, **layers)
    inner = dataclasses.replace(INNER, accumulation=accumulation)
    state, history = trained(config, inner, mesh, batches, loss)
    score = evaluate(config, make_eval_step(config, mesh, loss), state.params, batches, mesh)
    return unstacked(jax.device_get(state.params)), history, score


FSDP = ({"fsdp": 2}, 2, {})
STAGES = ({"stage": 2}, 1, {"num_layers": 2, "scan_layers": True})


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("vit", FSDP, marks=pytest.mark.slow),
        pytest.param("captioner", STAGES, marks=pytest.mark.slow),
        pytest.param("vit", STAGES, marks=pytest.mark.slow),
        pytest.param("captioner", FSDP, marks=pytest.mark.slow),
    ],
    ids=["vit-fsdp", "captioner-stages", "vit-stages", "captioner-fsdp"],
)
def test_eight_devices_agree_with_one(name, layout):
    sizes, accumulation, layers = layout
    expected, expected_history, expected_score = run(name, mesh_of(1), **layers)
    params, history, score = run(name, mesh_of(8, data=2, tensor=2, **sizes), accumulation, **layers)
    for metrics, wanted in zip(history, expected_history, strict=True):
        assert metrics["tokens"] == wanted["tokens"]
        for key in ("loss", "grad_norm", "accuracy"):
            np.testing.assert_allclose(metrics[key], wanted[key], rtol=1e-5, err_msg=key)
    for key, leaf in params.items():
        np.testing.assert_allclose(leaf, expected[key], rtol=1e-5, atol=2e-5, err_msg=key)
    assert score.loss == pytest.approx(expected_score.loss, rel=1e-6)
    assert score.statistics == expected_score.statistics
