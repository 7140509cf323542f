"""Slots and lanes: bounded, and true to what was put in."""

import itertools

import pytest

from ddiloco.page.timeline import Lane, Slots, Span, coarse


def test_sums_stay_the_same_when_slots_get_wider():
    slots = Slots(100.0, capacity=8, width=1.0)
    for second in range(1000):
        slots.add(100.0 + second, "tokens", 2.0)
    assert slots.width == 128.0 and slots.used == 8
    assert slots.sums("tokens") == [256.0] * 7 + [208.0]


def test_a_mean_is_of_what_was_counted_and_none_of_nothing():
    slots = Slots(0.0, capacity=8, width=1.0)
    for time, loss in ((0.5, 4.0), (0.6, 2.0), (2.5, 1.0)):
        slots.add(time, "loss", loss)
        slots.add(time, "losses")
    assert slots.means("loss", "losses") == [3.0, None, 1.0]


def test_what_is_before_the_start_counts_in_the_first_slot():
    slots = Slots(10.0, capacity=8, width=1.0)
    slots.add(3.0, "tokens")
    assert slots.sums("tokens") == [1.0]


def test_a_lane_shows_when_a_learner_stood_still():
    lane = Lane()
    lane.enter("stepping", 0.0)
    lane.hung(10.0, 30.0)
    lane.enter("dead", 40.0)
    assert lane.spans(50.0, 10) == [
        Span("stepping", 0.0, 10.0),
        Span("hung", 10.0, 30.0),
        Span("stepping", 30.0, 40.0),
        Span("dead", 40.0, 50.0),
    ]


def test_a_clock_that_is_set_back_does_not_turn_a_span_round():
    lane = Lane()
    lane.enter("stepping", 10.0)
    lane.enter("dead", 5.0)
    assert lane.spans(20.0, 10) == [Span("dead", 10.0, 20.0)]


def test_a_lane_of_many_changes_is_bounded_and_covers_all_its_time():
    lane = Lane(capacity=64)
    for second in range(10_000):
        lane.enter("stepping" if second % 2 else "waiting", float(second))
    spans = lane.spans(10_000.0, 32)
    assert len(spans) <= 32 and len(lane._spans) <= 65
    assert spans[0].start == 0.0 and spans[-1].end == pytest.approx(10_000.0)
    assert all(before.end == pytest.approx(after.start) for before, after in itertools.pairwise(spans))


def test_a_short_outage_is_seen_in_a_coarse_lane():
    spans = [Span("stepping", 0.0, 47.0), Span("dead", 47.0, 48.0), Span("stepping", 48.0, 100.0)]
    assert "dead" in {span.state for span in coarse(spans, 20)}
