"""How the gap goes with parameters and tokens."""

import itertools
import math

import pytest

from experiments.studies.scaling.measurements import ScalingError
from experiments.studies.scaling.study import gap_trend


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
