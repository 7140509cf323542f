"""Confidence: intervals hold the truth and narrow with the noise; the largest size is foretold, not seen."""

import numpy as np
import pytest

from experiments.studies.scaling.confidence import hold_out_largest, intervals, percentiles
from experiments.studies.scaling.laws import LAWS, fit
from experiments.studies.scaling.measurements import Place, ScalingError, redrawn
from tests.studies.scaling.synthetic import losses_of


def power(n, d, m):
    return 12.0 * n**-0.12 * m**0.02


def with_floor(n, d, m):
    return 40.0 * n**-0.35 * m**0.04 + 1.1


def test_a_bootstrap_over_many_seeds_holds_the_truth_and_narrows_with_the_noise():
    widths = []
    for noise in (0.02, 0.002):
        losses = losses_of(power, noise=noise, seeds=8, rng=np.random.default_rng(5))
        found = intervals(LAWS["power"], losses, np.random.default_rng(0), draws=60)
        low, high = found["alpha"]
        assert low - 0.3 * (high - low) < -0.12 < high + 0.3 * (high - low)
        widths.append(high - low)
    assert widths[1] < 0.3 * widths[0]


def test_the_same_generator_gives_the_same_intervals():
    losses = losses_of(power, noise=0.01, seeds=3, rng=np.random.default_rng(5))
    first, second = (intervals(LAWS["power"], losses, np.random.default_rng(2), draws=5) for _ in range(2))
    assert first == second


def test_what_seeds_do_alike_at_all_places_is_not_in_the_interval_of_a_comparison_between_learners():
    losses = losses_of(power, common=0.015, seeds=3, rng=np.random.default_rng(5))
    found = intervals(LAWS["power"], losses, np.random.default_rng(0), draws=40)
    widths = {name: high - low for name, (low, high) in found.items()}
    assert widths["beta"] < 1e-6 and widths["alpha"] < 1e-6
    assert widths["A"] > 0.01 * 12.0


def test_what_seeds_do_alike_at_all_places_is_in_the_interval_of_a_level():
    place, rng, widths = [Place(130_000, 2_600_000, 4)], np.random.default_rng(5), []
    for _ in range(8):
        losses = losses_of(power, common=0.015, noise=0.004, seeds=3, rng=rng)
        begin = fit(LAWS["power"], losses).theta
        drawn = [fit(LAWS["power"], redrawn(losses, rng), begin).predict(place)[0] for _ in range(40)]
        low, high = percentiles([{"log loss": float(np.log(loss))} for loss in drawn])["log loss"]
        widths.append(high - low)
    # A mean of three seeds spreads by 0.015 over the root of 3; a bootstrap of three shows most of that.
    assert np.mean(widths) > 0.6 * 2 * 1.96 * 0.015 / np.sqrt(3)


def test_one_seed_has_no_interval():
    with pytest.raises(ScalingError, match="every place has one"):
        intervals(LAWS["power"], losses_of(power), np.random.default_rng(0))


def test_the_largest_size_is_foretold_by_the_law_that_is_true():
    held = hold_out_largest(LAWS["power"], losses_of(power))
    assert held.params == 350_000 and held.error < 1e-6


def test_a_law_without_the_floor_that_there_is_misses_the_largest_size():
    losses = losses_of(with_floor)
    wrong, right = (hold_out_largest(LAWS[name], losses) for name in ("power", "floor"))
    assert right.error < 1e-4 < 0.01 < wrong.error


def test_what_is_left_must_determine_the_law():
    with pytest.raises(ScalingError, match="there is 1 size of a model, but holding one out needs two"):
        hold_out_largest(LAWS["power"], losses_of(power, sizes=(20_000,)))
    with pytest.raises(ScalingError, match="needs 2 values of N, but there are 1"):
        hold_out_largest(LAWS["power"], losses_of(power, sizes=(20_000, 50_000)))
