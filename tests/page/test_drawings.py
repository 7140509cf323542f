"""Charts and lanes: round ticks that enclose what is drawn, and forms in the right place."""

import pytest

from ddiloco.observe.series import StateSpan
from ddiloco.page.sheet import ChartLine, _ticks, chart, forms, strip


@pytest.mark.parametrize(
    ("values", "zero", "ticks"),
    [
        ([2.0, 6.3], False, [2, 3, 4, 5, 6, 7]),
        ([0.0, 400.0], True, [0, 100, 200, 300, 400]),
        ([3.0, 3.0], True, [0, 1, 2, 3]),
        ([5.0], False, [5, 6, 7, 8, 9, 10]),
        ([0.0], True, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ([-1.0, 1.0], False, [-1.0, -0.5, 0.0, 0.5, 1.0]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(values, zero, ticks):
    assert _ticks(values, zero) == pytest.approx(ticks)


def test_one_peak_does_not_flatten_a_long_curve():
    assert _ticks([2.0] * 50 + [2.5] * 49 + [900.0], zero=False)[-1] < 200


def test_a_curve_goes_from_corner_to_corner_and_leaves_out_what_is_not_known():
    drawn = chart("Loss", "nats", [ChartLine("a", [0.0, 5.0, 10.0], [1.0, None, 0.0], 0)], end=10.0)
    assert drawn.curves[0].path == "M0.0 0.0L1000.0 200.0"
    assert drawn.in_words == "Loss in nats. At the end: a 0."


def test_nothing_known_is_nothing_drawn():
    assert chart("Loss", "nats", [ChartLine("a", [0.0], [None], 0)], end=10.0) is None


def test_a_lane_has_a_form_for_each_state_and_a_bar_for_each_time_of_merging():
    spans = [StateSpan("stepping", 0.0, 50.0), StateSpan("dead", 50.0, 100.0)]
    drawn = dict(forms(spans, 100.0))
    assert drawn["stepping"] == "M0.0 1h500.0v18h-500.0z" and drawn["dead"].startswith("M500.0 8h500.0")
    merged = strip([1.0, None, 0.0, 0.5], 25.0, 100.0)
    assert merged == "M0.0 22.0h500.0v6.0h-500.0zM750.0 25.0h250.0v3.0h-250.0z"
