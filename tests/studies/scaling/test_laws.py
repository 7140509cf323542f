"""Laws: known parameters are found again, and what does not determine them is told.

Intervals hold the truth and narrow with the noise; the largest size is foretold, not seen.
"""

import math

import numpy as np
import pytest

from experiments.studies.scaling.laws import LAWS, fit, hold_out_largest, intervals
from experiments.studies.scaling.measurements import ScalingError
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


def test_one_wild_loss_moves_a_huber_fit_far_less_than_it_is_wrong():
    loss, known = KNOWN["power"]
    losses = losses_of(loss)
    losses.loc[(losses.params == 350_000) & (losses.learners == 8), "loss"] *= 1.3
    found = fit(LAWS["power"], losses).parameters
    assert found["alpha"] == pytest.approx(known["alpha"], abs=1e-3)
    assert found["beta"] == pytest.approx(known["beta"], abs=1e-3)


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


@pytest.mark.slow
def test_a_bootstrap_over_many_seeds_holds_the_truth_and_narrows_with_the_noise():
    widths = []
    for noise in (0.02, 0.002):
        losses = losses_of(KNOWN["power"][0], noise=noise, seeds=8, rng=np.random.default_rng(5))
        found = intervals(LAWS["power"], losses, np.random.default_rng(0), draws=60)
        low, high = found["alpha"]
        assert low - 0.3 * (high - low) < -0.0985 < high + 0.3 * (high - low)
        widths.append(high - low)
    assert widths[1] < 0.3 * widths[0]


def test_what_seeds_do_alike_at_all_places_is_not_in_the_interval_of_a_comparison_between_learners():
    losses = losses_of(KNOWN["power"][0], common=0.015, seeds=3, rng=np.random.default_rng(5))
    found = intervals(LAWS["power"], losses, np.random.default_rng(0), draws=40)
    widths = {name: high - low for name, (low, high) in found.items()}
    assert widths["beta"] < 1e-6 and widths["alpha"] < 1e-6
    assert widths["A"] > 0.01 * 19.2


def test_one_seed_has_no_interval():
    with pytest.raises(ScalingError, match="every place has one"):
        intervals(LAWS["power"], losses_of(KNOWN["power"][0]), np.random.default_rng(0))


def test_a_law_without_the_floor_that_there_is_misses_the_largest_size():
    losses = losses_of(KNOWN["floor"][0])
    wrong, right = (hold_out_largest(LAWS[name], losses) for name in ("power", "floor"))
    assert right["error"] < 1e-4 < 0.01 < wrong["error"]
