"""How the gap goes with parameters and tokens."""

import itertools
import math

import numpy as np
import pytest

from experiments.studies.scaling.laws import gaps_at
from experiments.studies.scaling.measurements import ScalingError
from experiments.studies.scaling.study import extrapolate, gap_trend
from tests.studies.scaling.synthetic import losses_of


def rows(gap, multiples=(5, 10, 20)):
    """Rows of four sizes, in batches of a thousand tokens, M=1 and data-parallel among them."""
    found = []
    for n, multiple, m in itertools.product((25_000, 40_000, 76_000, 126_000), multiples, (0, 1, 2, 8)):
        d = 1000 * round(n * multiple / 1000)
        found.append({"params": n, "tokens": d, "learners": m, "gap": gap(n, d, m) if m else None})
    return found


def test_slopes_are_those_of_the_gaps_whatever_the_constant_of_each_m_and_of_one_learner():
    trend = gap_trend(rows(lambda n, d, m: 1.0 if m == 1 else m + 0.004 * math.log(n) - 0.016 * math.log(d)))
    assert trend["learners"] == [2, 8]
    assert trend["params"] == pytest.approx([0.004, 0], abs=1e-9)
    assert trend["tokens"] == pytest.approx([-0.016, 0], abs=1e-9)


def test_what_no_slope_explains_is_in_the_errors():
    straight = lambda n, d, m: -0.016 * math.log(d)  # noqa: E731
    bent = gap_trend(rows(lambda n, d, m: straight(n, d, m) + (0.01 if (n, d) == (76_000, 760_000) else 0)))
    (by_n, n_error), (by_d, d_error) = bent["params"], bent["tokens"]
    assert 0 < abs(by_n) < 2 * n_error and 0 < abs(by_d + 0.016) < 2 * d_error


@pytest.mark.parametrize(
    ("multiples", "told"), [((), "needs runs with several"), ((20,), "needs more sizes")]
)
def test_what_the_runs_do_not_determine_is_said(multiples, told):
    with pytest.raises(ScalingError, match=told):
        gap_trend(rows(lambda n, d, m: 0.01, multiples))


def by_power_laws(n, d, m):
    return 20 * n**-0.2 * (1 + 9 * n**-0.5 * m if m else 1)


def test_a_gap_that_follows_a_power_law_is_found_again_at_another_size():
    found = gaps_at(losses_of(by_power_laws, learners=(0, 4)), 2e9)
    assert found["gaps"] == pytest.approx(36 * 2e9**-0.5)
    assert found["losses"] < 0 < found["gaps"], "the ratio of two powers of the size falls below 1"


def test_a_loss_that_follows_a_power_law_of_its_own_is_found_again_and_a_gap_below_zero_has_none():
    found = gaps_at(losses_of(lambda n, d, m: 20 * n ** (-0.2 - 0.001 * m), learners=(0, 4)), 2e9)
    assert found["losses"] == pytest.approx(2e9**-0.004 - 1)
    assert math.isnan(found["gaps"])


def test_each_number_of_learners_is_extrapolated_with_an_interval_over_seeds():
    rng = np.random.default_rng(0)
    losses = losses_of(by_power_laws, learners=(0, 2, 4), noise=0.001, seeds=3, rng=rng)
    two, four = extrapolate(losses, 2e9, lambda: np.random.default_rng(1), 50)
    assert (two["learners"], four["learners"], two["problem"]) == (2, 4, None)
    low, high = four["intervals"]["gaps"]
    assert low < four["gaps"]["gaps"] < high


def test_where_a_draw_of_the_seeds_has_no_gap_the_power_law_of_it_has_no_interval(recwarn):
    rng = np.random.default_rng(0)
    equal = losses_of(lambda n, d, m: 20 * n**-0.2, learners=(0, 4), noise=0.01, seeds=3, rng=rng)
    [four] = extrapolate(equal, 2e9, lambda: np.random.default_rng(1), 50)
    assert all(map(math.isnan, four["intervals"]["gaps"])) and not list(recwarn)
    assert four["intervals"]["losses"][0] < four["gaps"]["losses"] < four["intervals"]["losses"][1]


def test_where_data_parallel_is_missing_no_gap_is_extrapolated():
    losses = losses_of(by_power_laws, learners=(0, 4))
    without = losses[(losses.learners > 0) | (losses.params > 50_000)]
    [four] = extrapolate(without, 2e9, lambda: np.random.default_rng(1), 2)
    assert four["problem"] == "needs two sizes, and of data-parallel as many"
