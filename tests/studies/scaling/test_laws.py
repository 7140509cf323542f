"""Laws: known parameters are found again, and what does not determine them is told.

Intervals hold the truth and narrow with the noise; the largest size is foretold, not seen.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.studies.scaling.laws import (
    HUBER,
    LAWS,
    SINGLE,
    fit,
    hold_out_largest,
    intervals,
    percentiles,
)
from experiments.studies.scaling.measurements import ScalingError, means, redrawn
from tests.refusals import refusal
from tests.studies.scaling.synthetic import losses_of, table_of

MULTIPLES = (5, 10, 20)
KNOWN = {
    "power": (lambda n, d, m: 19.2 * n**-0.0985 * m**0.0116, {"A": 19.2, "alpha": -0.0985, "beta": 0.0116}),
    "floor": (
        lambda n, d, m: 40.0 * n**-0.35 * m**0.04 + 1.1,
        {"A": 40.0, "alpha": -0.35, "beta": 0.04, "E": 1.1},
    ),
    "exponent": (
        lambda n, d, m: 40.0 * n ** (-0.35 + 0.005 * math.log(m)) + 1.1,
        {"A": 40.0, "alpha": -0.35, "beta": 0.005, "E": 1.1},
    ),
    "tokens": (
        lambda n, d, m: 30.0 * n**-0.06 * d**-0.12 * m**0.02,
        {"A": 30.0, "alpha": -0.06, "gamma": -0.12, "beta": 0.02},
    ),
    "sum": (
        lambda n, d, m: (60.0 * n**-0.4 + 250.0 * d**-0.45 + 1.2) * m**0.02,
        {"A": 60.0, "alpha": -0.4, "B": 250.0, "gamma": -0.45, "E": 1.2, "beta": 0.02},
    ),
}


@pytest.mark.parametrize("name", LAWS)
def test_without_noise_the_parameters_are_found_exactly(name):
    loss, known = KNOWN[name]
    fitted = fit(LAWS[name], losses_of(loss, MULTIPLES if "D" in LAWS[name].distinct else (20,)))
    assert fitted.parameters == pytest.approx(known, rel=2e-3)
    assert fitted.residual < 1e-6
    places = table_of({"params": 10**6, "learners": 16})
    assert fitted.predict(places) == pytest.approx([loss(10**6, 2 * 10**7, 16)], rel=1e-3)


@pytest.mark.parametrize(("name", "tolerance"), [("power", 0.01), ("tokens", 0.02)])
def test_with_noise_the_exponents_are_found_within_its_size(name, tolerance):
    loss, known = KNOWN[name]
    rng = np.random.default_rng(1)
    fitted = fit(LAWS[name], losses_of(loss, MULTIPLES, noise=0.005, seeds=3, rng=rng))
    for exponent in ("alpha", "beta", "gamma"):
        assert fitted.parameters.get(exponent, 0) == pytest.approx(known.get(exponent, 0), abs=tolerance)


@settings(max_examples=25)
@given(
    st.floats(0.5, 50.0),
    st.floats(-0.4, -0.01),
    st.floats(-0.05, 0.1),
)
def test_the_power_law_is_found_whatever_its_parameters(scale, alpha, beta):
    fitted = fit(LAWS["power"], losses_of(lambda n, d, m: scale * n**alpha * m**beta))
    found = fitted.parameters
    assert (found["alpha"], found["beta"]) == pytest.approx((alpha, beta), abs=1e-5)
    assert found["A"] == pytest.approx(scale, rel=1e-3)


def test_one_wild_loss_moves_a_huber_fit_far_less_than_it_is_wrong():
    loss, known = KNOWN["power"]
    losses = losses_of(loss)
    losses.loc[(losses.params == 350_000) & (losses.learners == 8), "loss"] *= 1.3
    found = fit(LAWS["power"], losses).parameters
    assert found["alpha"] == pytest.approx(known["alpha"], abs=1e-3)
    assert found["beta"] == pytest.approx(known["beta"], abs=1e-3)


def test_a_law_that_does_not_hold_is_fitted_as_well_as_from_anywhere_else():
    losses = losses_of(KNOWN["floor"][0], noise=0.004, seeds=3, rng=np.random.default_rng(0))
    places = means(losses)

    def cost(fitted):
        off = np.abs(np.log(fitted.predict(places)) - np.log(places.loss)) / HUBER
        return np.sum(np.where(off <= 1, off**2 / 2, off - 0.5))

    here = cost(fit(LAWS["power"], losses))
    elsewhere = [cost(fit(LAWS["power"], losses, (3.0, alpha, 0.02))) for alpha in (-0.3, -0.2, -0.1, 0.0)]
    assert here <= min(elsewhere) * (1 + 1e-6)


def test_one_m_or_data_parallel_has_a_law_of_its_own():
    losses = losses_of(lambda n, d, m: 9.0 * n**-0.1, learners=(0,))
    assert fit(SINGLE, losses).parameters == pytest.approx({"A": 9.0, "alpha": -0.1}, rel=1e-4)


DEGENERATE = {
    "one size": ("power", {"sizes": (20_000,)}, "A N^alpha M^beta: needs 2 values of N, but there are 1"),
    "one M": ("power", {"learners": (4,)}, "A N^alpha M^beta: needs 2 values of M, but there are 1"),
    "two sizes and a floor": ("floor", {"sizes": (20_000, 50_000)}, "needs 3 values of N, but there are 2"),
    "tokens go with size": ("tokens", {}, "N, D, M do not vary independently of each other"),
    "nothing": ("power", {"sizes": ()}, "needs 2 values of N, but there are 0"),
    "data-parallel": ("power", {"learners": (0, 2)}, "has an M, which data-parallel training has not"),
}


@pytest.mark.parametrize(("name", "grid", "told"), DEGENERATE.values(), ids=DEGENERATE)
def test_what_does_not_determine_a_law_is_told_in_one_line(name, grid, told):
    losses = losses_of(KNOWN["power"][0], **grid)
    assert told in refusal(ScalingError, fit, LAWS[name], losses)


def test_fewer_places_than_parameters_are_told():
    places = [{"params": n, "learners": m, "loss": 2.0} for n, m in ((20_000, 1), (50_000, 2), (130_000, 2))]
    with pytest.raises(ScalingError, match="has 4 parameters, but there are 3 places"):
        fit(LAWS["floor"], table_of(*places))


def test_a_bootstrap_over_many_seeds_holds_the_truth_and_narrows_with_the_noise():
    widths = []
    for noise in (0.02, 0.002):
        losses = losses_of(KNOWN["power"][0], noise=noise, seeds=8, rng=np.random.default_rng(5))
        found = intervals(LAWS["power"], losses, np.random.default_rng(0), draws=60)
        low, high = found["alpha"]
        assert low - 0.3 * (high - low) < -0.0985 < high + 0.3 * (high - low)
        widths.append(high - low)
    assert widths[1] < 0.3 * widths[0]


def test_the_same_generator_gives_the_same_intervals():
    losses = losses_of(KNOWN["power"][0], noise=0.01, seeds=3, rng=np.random.default_rng(5))
    first, second = (intervals(LAWS["power"], losses, np.random.default_rng(2), draws=5) for _ in range(2))
    assert first == second


def test_what_seeds_do_alike_at_all_places_is_not_in_the_interval_of_a_comparison_between_learners():
    losses = losses_of(KNOWN["power"][0], common=0.015, seeds=3, rng=np.random.default_rng(5))
    found = intervals(LAWS["power"], losses, np.random.default_rng(0), draws=40)
    widths = {name: high - low for name, (low, high) in found.items()}
    assert widths["beta"] < 1e-6 and widths["alpha"] < 1e-6
    assert widths["A"] > 0.01 * 19.2


def test_what_seeds_do_alike_at_all_places_is_in_the_interval_of_a_level():
    place, rng, widths = table_of({"params": 130_000, "learners": 4}), np.random.default_rng(5), []
    for _ in range(8):
        losses = losses_of(KNOWN["power"][0], common=0.015, noise=0.004, seeds=3, rng=rng)
        begin = fit(LAWS["power"], losses).theta
        samples = redrawn(losses, rng, 40)
        drawn = [fit(LAWS["power"], sample, begin).predict(place)[0] for sample in samples]
        low, high = percentiles([{"log loss": float(np.log(loss))} for loss in drawn])["log loss"]
        widths.append(high - low)
    # A mean of three seeds spreads by 0.015 over the root of 3; a bootstrap of three shows most of that.
    assert np.mean(widths) > 0.6 * 2 * 1.96 * 0.015 / np.sqrt(3)


def test_one_seed_has_no_interval():
    with pytest.raises(ScalingError, match="every place has one"):
        intervals(LAWS["power"], losses_of(KNOWN["power"][0]), np.random.default_rng(0))


def test_the_largest_size_is_foretold_by_the_law_that_is_true():
    held = hold_out_largest(LAWS["power"], losses_of(KNOWN["power"][0]))
    assert held["params"] == 350_000 and held["error"] < 1e-6


def test_a_law_without_the_floor_that_there_is_misses_the_largest_size():
    losses = losses_of(KNOWN["floor"][0])
    wrong, right = (hold_out_largest(LAWS[name], losses) for name in ("power", "floor"))
    assert right["error"] < 1e-4 < 0.01 < wrong["error"]


def test_what_is_left_must_determine_the_law():
    with pytest.raises(ScalingError, match="there is 1 size of a model, but holding one out needs two"):
        hold_out_largest(LAWS["power"], losses_of(KNOWN["power"][0], sizes=(20_000,)))
    with pytest.raises(ScalingError, match="needs 2 values of N, but there are 1"):
        hold_out_largest(LAWS["power"], losses_of(KNOWN["power"][0], sizes=(20_000, 50_000)))
