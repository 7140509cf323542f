"""Best hyperparameters: parabolas are found exactly, the edge of a grid is no best value, laws follow."""

import itertools
import math

import numpy as np
import pytest

from experiments.studies.scaling import optima
from experiments.studies.scaling.measurements import ScalingError
from tests.studies.scaling.synthetic import LEARNERS, SIZES, table_of

RATES = tuple(1e-3 * 2**k for k in range(7))


def best_rate(n, m):
    return 0.4 * n**-0.4 * m**0.15


def bowls(learners=LEARNERS, rates=RATES, noise=0.0, seeds=1, rng=None):
    """Losses that are parabolas in the logarithm of the inner learning rate, around `best_rate`."""
    found = []
    for n, m, rate in itertools.product(SIZES, learners, rates):
        loss = 2.0 + 0.05 * math.log(rate / best_rate(n, max(m, 1))) ** 2
        draws = noise * rng.standard_normal(seeds) if noise else np.zeros(seeds)
        place = {"params": n, "learners": m, "inner_rate": rate}
        found += [{**place, "seed": seed, "loss": loss + draw} for seed, draw in enumerate(draws)]
    return table_of(*found)


def best_of(values):
    """A table of best values by (N, M)."""
    rows = [{"params": n, "learners": m, "value": value} for (n, m), value in values.items()]
    return table_of(*rows)


def test_a_best_value_lies_between_the_neighbours_of_the_lowest_loss_however_the_rest_bends():
    values = [1.0, 2.0, 4.0, 8.0, 16.0]
    found = optima.lowest(values, [0.0, 2.0, -0.1, 2.0, 0.0])
    assert 2.0 < found < 8.0


def test_best_rates_are_found_at_each_place_and_their_law_exactly():
    found = optima.find(bowls(), "inner_rate")
    assert len(found) == 16 and found.inner_rate.isna().all()
    want = [best_rate(n, m) for n, m in zip(found.params, found.learners, strict=True)]
    assert found.value.tolist() == pytest.approx(want, rel=1e-6)
    fitted = optima.fit_optima(found)
    assert fitted.parameters == pytest.approx({"A": 0.4, "alpha": -0.4, "beta": 0.15}, rel=1e-3)


def test_places_with_their_best_at_the_edge_have_no_value():
    found = optima.find(bowls(rates=RATES[:3]), "inner_rate")
    inside = found.value.dropna()
    assert len(inside) < len(found) == 16 and inside.between(RATES[0], RATES[2], inclusive="neither").all()


def test_at_one_size_the_law_is_in_m_alone_and_at_one_m_in_n_alone():
    at_size = best_of({(1000, m): 0.7 * m**0.2 for m in LEARNERS})
    assert optima.fit_optima(at_size).parameters == pytest.approx({"A": 0.7, "beta": 0.2}, rel=1e-4)
    at_m = best_of({(n, 0): 3.0 * n**-0.3 for n in SIZES})
    assert optima.fit_optima(at_m).parameters == pytest.approx({"A": 3.0, "alpha": -0.3}, rel=1e-4)
    with pytest.raises(ScalingError, match="there are 1, at one N and M, which make no law"):
        optima.fit_optima(best_of({(1000, 2): 0.7}))


def test_no_more_values_than_parameters_make_no_law():
    told = r"there are 2, and A N\^alpha goes through as many whether it holds or not"
    with pytest.raises(ScalingError, match=told):
        optima.fit_optima(best_of({(n, 0): 3.0 * n**-0.3 for n in SIZES[:2]}))


@pytest.mark.slow
def test_intervals_of_a_law_of_best_values_hold_the_truth():
    losses = bowls(noise=0.002, seeds=5, rng=np.random.default_rng(4))
    kept = optima.find(losses, "inner_rate").dropna(subset="value")
    found = optima.intervals(losses, "inner_rate", kept, np.random.default_rng(0), draws=40)
    assert found["alpha"][0] - 0.05 < -0.4 < found["alpha"][1] + 0.05
    assert found["alpha"][0] < found["alpha"][1]
    with pytest.raises(ScalingError, match="every place has one"):
        optima.intervals(bowls(), "inner_rate", kept, np.random.default_rng(0))
