"""Evaluation is the mean over all targets that count, not over batches."""

import dataclasses

import numpy as np
import pytest

from ddiloco.training.evaluation import evaluate, make_eval_step
from ddiloco.training.parameters import sampled_parameters
from tests.training.batches import TINY, mesh_of, packed_batch

ONE_LAYER = dataclasses.replace(TINY, num_layers=1)


@pytest.fixture(scope="module")
def scored():
    mesh = mesh_of(1)
    return make_eval_step(ONE_LAYER, mesh), dict(sampled_parameters(ONE_LAYER, 0)), mesh


def test_every_token_weighs_the_same_whatever_batch_it_is_in(scored):
    eval_step, params, mesh = scored
    batches = [packed_batch(seed, 2, 12, 32) for seed in range(3)]
    batches[1]["weights"][:, 4:] = 0
    sums = [eval_step(params, batch) for batch in batches]
    nll = sum(np.float64(found.nll) for found in sums)
    tokens = sum(batch["weights"].sum() for batch in batches)
    score = evaluate(ONE_LAYER, eval_step, params, iter(batches), mesh)
    assert score == (pytest.approx(nll / tokens, rel=1e-12), {})
    by_batch = np.mean([float(found.nll) / int(found.tokens) for found in sums])
    assert abs(by_batch - nll / tokens) > 1e-6


def test_an_evaluation_without_tokens_is_refused(scored):
    eval_step, params, mesh = scored
    padding = {name: np.zeros_like(rows) for name, rows in packed_batch(0, 2, 12, 32).items()}
    for batches in ([], [padding]):
        with pytest.raises(ValueError, match="the evaluation has no tokens"):
            evaluate(ONE_LAYER, eval_step, params, batches, mesh)
