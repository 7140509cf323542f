"""Measurements: what a sweep's rows come to, and what they lack is told."""

import numpy as np
import pytest

from experiments.studies.scaling import measurements
from experiments.studies.scaling.measurements import GridPlace, ScalingError
from tests.refusals import refusal


def row(loss, params=1000, tokens=20_000, learners=2, seed=0, **settings):
    figures = {"eval_loss": loss, "num_params": params, "tokens_total": tokens}
    return {"algorithm": "decoupled", "sync.num_learners": learners, "seed": seed, **settings, **figures}


def test_runs_that_differ_in_their_seed_alone_are_one_place():
    study = measurements.read_rows([row(2.0, seed=0), row(2.1, seed=1, tokens=20_003), row(1.9, params=2000)])
    assert study.losses == {
        GridPlace(1000, 20_002, 2): {"0": 2.0, "1": 2.1},
        GridPlace(2000, 20_002, 2): {"0": 1.9},
    }
    assert study.without_loss == 0


def test_tokens_within_two_percent_are_one_d_and_others_are_not():
    study = measurements.read_rows(
        [row(2.0, tokens=20_000), row(2.1, tokens=20_200, learners=4), row(2.2, tokens=40_000)]
    )
    assert sorted(place.tokens for place in study.losses) == [20_100, 20_100, 40_000]


def test_a_seed_that_two_sweeps_share_counts_once():
    study = measurements.read_rows([row(2.0), row(2.0), row(2.2, seed="1")])
    assert list(study.losses.values()) == [{"0": 2.0, "1": 2.2}]


def test_data_parallel_has_no_learners_and_text_is_read_as_numbers():
    entry = row(2.0, learners="4", **{"inner.learning_rate": "0.01", "train.steps": "20"})
    study = measurements.read_rows([entry, {**entry, "algorithm": "data_parallel"}])
    assert [place.learners for place in study.losses] == [4, 0]
    assert {(place.inner_rate, place.batch_tokens) for place in study.losses} == {(0.01, 1000.0)}


def test_runs_without_a_loss_are_counted_and_left_out():
    study = measurements.read_rows([row(2.0), row(None, seed=1), row(float("nan"), seed=2)])
    assert (list(study.losses.values()), study.without_loss) == ([{"0": 2.0}], 2)


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
    low, high = GridPlace(1000, 20_000, 2, inner_rate=1e-3), GridPlace(1000, 20_000, 2, inner_rate=3e-3)
    other = GridPlace(1000, 20_000, 4, inner_rate=1e-3)
    lowest = {high: {0: 2.1, 1: 2.1}, other: {0: 3.0}}
    assert measurements.best({low: {0: 2.0, 1: 2.4}, **lowest}) == lowest


def test_of_each_size_the_most_tokens_are_kept():
    places = {GridPlace(n, d, 2): {0: 2.0} for n, d in ((1000, 5_000), (1000, 20_000), (2000, 9_000))}
    assert list(measurements.with_most_tokens(places)) == [
        GridPlace(1000, 20_000, 2),
        GridPlace(2000, 9_000, 2),
    ]


def test_one_set_of_seeds_is_drawn_for_all_places_that_have_them_and_follows_from_the_generator():
    one, other, few = (GridPlace(n, 5_000, 2) for n in (1000, 2000, 3000))
    losses = {one: {"0": 1.0, "1": 2.0, "2": 3.0}, other: {"2": 30.0, "1": 20.0, "0": 10.0}, few: {"1": 7.0}}
    for seed in range(20):
        drawn, again = (measurements.redrawn(losses, np.random.default_rng(seed)) for _ in range(2))
        assert drawn == again and set(drawn) == set(losses)
        assert len(drawn[one]) == 3 and set(drawn[one].values()) <= {1.0, 2.0, 3.0}
        assert {k: 10 * loss for k, loss in drawn[one].items()} == drawn[other]
        assert set(drawn[few].values()) == {7.0}
