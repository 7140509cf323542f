"""Measurements: what a sweep's rows come to, and what they lack is told."""

import numpy as np
import pytest

from experiments.studies.scaling import measurements
from experiments.studies.scaling.measurements import ScalingError
from tests.refusals import refusal
from tests.studies.scaling.synthetic import table_of


def row(loss, params=1000, tokens=20_000, learners=2, seed=0, **settings):
    figures = {"eval_loss": loss, "num_params": params, "tokens_total": tokens}
    return {"algorithm": "decoupled", "sync.num_learners": learners, "seed": seed, **settings, **figures}


def read(*rows, without_loss=0):
    """The table of these rows."""
    losses, without = measurements.read_rows(rows)
    assert without == without_loss
    return losses


def test_runs_that_differ_in_their_seed_alone_are_one_place():
    losses = read(row(2.0, seed=0), row(2.1, seed=1, tokens=20_003), row(1.9, params=2000))
    assert losses.tokens.tolist() == [20_002] * 3 and losses.seed.tolist() == ["0", "1", "0"]
    assert measurements.means(losses).loss.tolist() == pytest.approx([2.05, 1.9])


def test_tokens_within_two_percent_are_one_d_and_others_are_not():
    rows = [row(2.0, tokens=20_000), row(2.1, tokens=20_200, learners=4), row(2.2, tokens=40_000)]
    assert read(*rows).tokens.tolist() == [20_100, 20_100, 40_000]


def test_data_parallel_has_no_learners_and_text_is_read_as_numbers():
    entry = row(2.0, learners="4", **{"inner.learning_rate": "0.01", "train.steps": "20"})
    losses = read(entry, {**entry, "algorithm": "data_parallel"})
    assert losses.learners.tolist() == [4, 0]
    assert losses[["inner_rate", "batch_tokens"]].to_numpy().tolist() == [[0.01, 1000.0]] * 2


def test_runs_without_a_loss_are_counted_and_left_out():
    losses = read(row(2.0), row(None, seed=1), row(float("nan"), seed=2), without_loss=2)
    assert losses.loss.tolist() == [2.0]


WRONG = {
    "no run": ([], "the sweep has no loss: of 0 runs none has one"),
    "no loss": ([row(None)], "the sweep has no loss: of 1 runs none has one"),
    "no params": ([row(2.0, params=None)], "row 0: num_params is None, but must be a number above 0"),
    "no learners": (
        [row(2.0), row(2.0, learners="all")],
        "row 1: sync.num_learners is 'all', but must be a number",
    ),
    "no tokens": ([row(2.0, tokens=0)], "row 0: tokens_total is 0, but must be a number above 0"),
}


@pytest.mark.parametrize(("rows", "told"), WRONG.values(), ids=WRONG)
def test_rows_that_lack_something_are_told_in_one_line(rows, told):
    assert refusal(ScalingError, measurements.read_rows, rows) == told


def test_the_best_hyperparameters_are_those_of_the_lowest_mean():
    place = {"params": 1000, "learners": 2}
    losses = [{**place, "inner_rate": 1e-3, "seed": seed, "loss": 2.0 + 0.4 * seed} for seed in (0, 1)]
    losses += [{**place, "inner_rate": 3e-3, "seed": seed, "loss": 2.1} for seed in (0, 1)]
    losses.append({"params": 1000, "learners": 4, "inner_rate": 1e-3, "loss": 3.0})
    assert measurements.best(table_of(*losses)).loss.tolist() == [2.1, 2.1, 3.0]


def test_one_set_of_seeds_is_drawn_for_all_places_that_have_them_and_follows_from_the_generator():
    by_seed = {
        1000: {"0": 1.0, "1": 2.0, "2": 4.0},
        2000: {"2": 40.0, "1": 20.0, "0": 10.0},
        3000: {"1": 7.0},
    }
    rows = [
        {"params": n, "learners": 2, "seed": seed, "loss": loss}
        for n, own in by_seed.items()
        for seed, loss in own.items()
    ]
    found = set()
    samples = (measurements.redrawn(table_of(*rows), np.random.default_rng(0), 20) for _ in range(2))
    for drawn, again in zip(*samples, strict=True):
        assert drawn.equals(again)
        one, other, few = drawn.loss
        assert other == pytest.approx(10 * one) and few == 7.0 and 1.0 <= one <= 4.0
        found.add(one)
    assert len(found) > 5
