"""The guard: who is out of line, who is in quarantine, and that honest learners never are."""

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.config import ConfigError, build
from ddiloco.outer.guards import (
    SAMPLE,
    WITNESSES,
    Guard,
    GuardConfig,
    Offered,
    Past,
    direction,
    draw_witnesses,
    medians_of_others,
    norm,
    offered,
    sample_counts,
    sample_lines,
    sampled_cosines,
)
from ddiloco.outer.offers import OfferSampler
from tests.long import times

SEEDS = st.integers(0, 2**32 - 1)
CONFIG = GuardConfig()


def honest(rng, learner, scale=1.0, cosine=0.15, steps=24):
    """An offer that differs from others as honest ones were found to: docs/results/security.md."""
    length = scale * steps**0.75
    return Offered(
        learner,
        steps,
        length * rng.uniform(0.8, 1.2),
        0.01 * length * rng.uniform(0.65, 1.5),
        cosine if cosine is None else cosine * rng.uniform(0.3, 1.7),
    )


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def guard():
    return Guard(CONFIG)


def kinds(verdict):
    return [(notice.kind, notice.learner) for notice in verdict.notices]


@settings(max_examples=times(15, 40))
@given(SEEDS, st.integers(1, 8), st.booleans())
def test_honest_learners_are_never_left_out_whatever_their_number_and_the_learning_rate(seed, most, alone):
    rng = np.random.default_rng(seed)
    guard = Guard(CONFIG)
    for round_ in range(120):
        here = rng.permutation(8)[: rng.integers(1, most + 1)]
        scale = min(1.0, (round_ // 3 + 0.5) / 20) * (1 + np.cos(np.pi * round_ / 130)) / 2
        cosine = None if len(here) < 3 or alone else 0.15
        offers = [honest(rng, int(m), scale, cosine, int(rng.integers(6, 33))) for m in here]
        verdict = guard.judge(round_ % 3, offers, length=lambda: 100.0)
        assert not verdict.left_out
        assert not verdict.notices


@settings(max_examples=40)
@given(SEEDS, st.floats(12, 1e30), st.integers(3, 8))
def test_a_long_outer_gradient_is_left_out_in_its_first_round(seed, factor, count):
    rng = np.random.default_rng(seed)
    offers = [honest(rng, m) for m in range(count)]
    liar = offers[-1]._replace(norm=offers[-1].norm * factor, peak=offers[-1].peak * factor)
    assert Guard(CONFIG).judge(0, [*offers[:-1], liar]).left_out == {count - 1}


@settings(max_examples=20)
@given(SEEDS, st.floats(40, 1e6))  # honest peaks differ by a factor of two
def test_one_long_piece_is_enough(seed, factor):
    rng = np.random.default_rng(seed)
    offers = [honest(rng, m) for m in range(4)]
    offers[2] = offers[2]._replace(peak=offers[2].peak * factor)
    assert norm(offers, Past()).keys() == {2}


@pytest.mark.parametrize(("factor", "left_out"), [(32.0, set()), (1e4, {1, 3})])
def test_where_half_are_longer_nobody_is_right_until_they_are_far_longer(factor, left_out, rng):
    """Two of four that met a rare token in one of the first rounds were 32 times as long as the others."""
    offers = [honest(rng, m, scale=factor if m in (1, 3) else 1.0) for m in range(4)]
    assert norm(offers, Past()).keys() == left_out
    assert norm(offers[:3], Past()).keys() == {1}


def test_more_tokens_than_its_steps_can_have_had_are_not_believed(rng):
    offers = [honest(rng, m, steps=10)._replace(tokens=80) for m in range(4)]
    liar = offers[3]._replace(tokens=81)
    assert Guard(CONFIG, step_tokens=8).judge(0, [*offers[:3], liar]).left_out == {3}
    assert not Guard(CONFIG, step_tokens=8).judge(0, offers).left_out
    assert not Guard(CONFIG).judge(0, [*offers[:3], liar]).left_out, "where a step's tokens are not known"


def unread() -> float:
    raise AssertionError("the parameters are read for nothing")


def test_alone_in_a_round_it_is_compared_with_what_others_offered_before(rng, guard):
    for learner in (0, 1, 2, 3, 0, 1):
        assert not guard.judge(5, [honest(rng, learner, cosine=None)]).left_out
    liar = honest(rng, 3, scale=30.0, cosine=None)
    assert guard.judge(5, [liar], length=unread).left_out == {3}
    assert not guard.judge(6, [liar]).left_out, "of another fragment nothing is known yet"
    assert guard.judge(6, [liar], length=lambda: liar.norm / 31).left_out == {3}


@pytest.mark.parametrize("others", [[], [0]])
def test_with_fewer_than_three_learners_only_what_no_learner_could_have_done_is_left_out(others, rng, guard):
    for round_ in range(40):
        offers = [honest(rng, m, cosine=None) for m in (*others, 9)]
        assert not guard.judge(0, offers, length=lambda: 100.0).left_out
        if round_ % 10 == 9:
            near, far = (honest(rng, 9, scale=scale, cosine=None) for scale in (20.0, 1e6))
            assert not guard.judge(0, [*offers[:-1], near], length=lambda: 100.0).left_out
            assert guard.judge(0, [*offers[:-1], far], length=lambda: 100.0).left_out == {9}
    assert not guard.quarantined


def test_the_last_learner_that_is_left_is_not_held_against_those_that_went_long_ago(rng, guard):
    for round_ in range(60):
        here = range(3) if round_ < 6 else [0]
        offers = [honest(rng, m, scale=(round_ + 0.5) / 60, cosine=None) for m in here]
        assert not guard.judge(0, offers, length=lambda: 10.0).left_out


def test_a_new_size_of_all_learners_is_believed_once_half_have_shown_it(rng, guard):
    for learner in 2 * list(range(5)):
        assert not guard.judge(0, [honest(rng, learner, cosine=None)]).left_out
    faster = [guard.judge(0, [honest(rng, m, 10.0, None)]).left_out for m in 2 * list(range(5))]
    assert [bool(out) for out in faster] == [True, True, *[False] * 8]
    assert not guard.quarantined


def test_a_learner_that_turns_away_from_a_clear_direction_is_found_at_once():
    offers = [Offered(m, 24, 1.0, 0.1, 0.6) for m in range(7)]
    assert direction([*offers, Offered(7, 24, 1.0, 0.1, -0.6)], Past()).keys() == {7}
    assert not direction([*offers, Offered(7, 24, 1.0, 0.1, -0.1)], Past())


@pytest.mark.parametrize("lie", [-1.0, 0.0])
def test_where_directions_are_faint_an_average_tells_who_points_elsewhere(lie, guard):
    rng = np.random.default_rng(1)
    found = []
    for round_ in range(160):
        offers = [honest(rng, m) for m in range(7)]
        away = Offered(7, 24, 10.0, 0.1, lie * 0.15 + 0.004 * rng.standard_normal())
        found.append(guard.judge(round_ % 12, [*offers, away]).left_out)
    assert found[:120] == [frozenset()] * 120, "cosines of 0.15 say little in fewer rounds"
    assert found[140:] == [{7}] * 20
    assert guard.quarantined == {7}


def test_three_strikes_put_a_learner_in_quarantine_and_it_comes_back_after_enough_offers_that_pass(rng):
    guard = Guard(CONFIG)

    def round_of(factor):
        return guard.judge(0, [*(honest(rng, m) for m in range(4)), honest(rng, 4, factor)])

    assert [kinds(round_of(1e6)) for _ in range(3)] == [
        [("left_out", 4)],
        [("left_out", 4)],
        [("left_out", 4), ("quarantined", 4)],
    ]
    for _ in range(23):
        verdict = round_of(1.0)
        assert verdict.left_out == {4}
        assert not verdict.notices
    assert kinds(round_of(1e6)) == [("left_out", 4)], "and it counts from the beginning"
    assert [kinds(round_of(1.0)) for _ in range(24)] == [*[[]] * 23, [("released", 4)]]
    assert not guard.quarantined
    assert not round_of(1.0).left_out


def test_alarms_are_sentences_that_name_the_learner_and_the_reason(rng):
    guard = Guard(CONFIG)
    offers = [*(honest(rng, m) for m in range(3)), honest(rng, 9, 1e6)]
    told = [[notice.alarm for notice in guard.judge(0, offers).notices] for _ in range(3)]
    left_out = "learner 9 has an offer left out of a merge"
    assert [one[0] for one in told] == [
        f"{left_out}: its outer gradient is far longer than those of others"
    ] * 3
    assert [one[1:] for one in told] == [
        [],
        [],
        [
            "learner 9 is in quarantine: none of its offers is merged: "
            "its outer gradient is far longer than those of others"
        ],
    ]


def test_what_a_learner_in_quarantine_offers_is_no_measure_for_the_others(rng):
    guard = Guard(CONFIG)
    for _ in range(3):
        guard.judge(0, [*(honest(rng, m) for m in range(3)), honest(rng, 3, 1e6)])
    assert guard.quarantined == {3}
    for _ in range(5):
        far = honest(rng, 3, 1e6)
        verdict = guard.judge(0, [honest(rng, 0), honest(rng, 1), far])
        assert verdict.left_out == {3}


def test_no_more_than_a_minority_is_ever_in_quarantine(rng):
    guard = Guard(CONFIG)
    for liar in (4, 3, 2, 1):
        for _ in range(3):
            offers = [honest(rng, m, 1e6 if m == liar else 1.0) for m in range(5)]
            guard.judge(0, offers)
    assert len(guard.quarantined) == 2


def test_a_learner_that_does_not_move_is_no_reason_to_leave_others_out():
    still = [Offered(m, 24, 0.0, 0.0) for m in range(3)]
    moving = Offered(3, 24, 1.0, 0.1)
    assert not norm([still[0], moving, moving._replace(learner=4)], Past())
    assert np.isfinite(still[0].normalized).all()


def test_cosines_with_fewer_than_two_others_say_nothing():
    one = offered([0, 1], [(1, 1)] * 2, np.ones((1, 2)), [4], np.array([[np.nan, 1.0], [1.0, np.nan]]))
    assert [offer.cosine for offer in one] == [None, None]


def test_gates_are_named_in_the_settings():
    assert build(GuardConfig, {"gates": ["norm"]}).gates == ("norm",)
    with pytest.raises(ConfigError, match=r"'norms' is none; there are tokens, norm, direction"):
        build(GuardConfig, {"gates": ["norms"]})


def test_learners_whose_rows_did_not_move_are_no_measure_for_one_whose_did(guard):
    """As of rows of an embedding that few tokens call for."""
    still = [Offered(m, 24, 1e-8, 1e-10) for m in range(3)]
    for length in (0.03, 0.003, 0.1):
        moved = Offered(3, 24, length, length / 50)
        assert not guard.judge(0, [*still, moved], length=lambda: 1.0).left_out
    assert guard.judge(0, [*still, Offered(3, 24, 40.0, 1.0)], length=lambda: 1.0).left_out == {3}


def test_what_is_no_longer_than_what_passed_before_is_not_left_out(guard):
    short = [Offered(m, 24, 0.001 * (1 + m / 10), 1e-5) for m in range(4)]
    assert not guard.judge(0, [Offered(m, 24, 0.1, 1e-3) for m in range(4)]).left_out
    assert not guard.judge(0, [*short[:3], Offered(3, 24, 0.09, 9e-4)]).left_out
    assert guard.judge(0, [*short[:3], Offered(3, 24, 0.2, 2e-3)]).left_out == {3}
    for _ in range(24):
        assert not guard.judge(0, short).left_out
    assert guard.judge(0, [*short[:3], Offered(3, 24, 0.09, 9e-4)]).left_out == {3}


def test_as_long_a_stretch_of_odd_data_as_an_honest_learner_met_is_not_held_against_it(guard):
    """Of `dense.py:tiny,diloco` with an interval of 4: 40 rounds in which one of four pointed nowhere."""
    for round_ in range(400):
        odd = 50 <= round_ % 100 < 90
        cosines = [0.14, 0.15, 0.16, (-0.03 if round_ % 7 else -0.2) if odd else 0.1]
        offers = [Offered(m, 4, 1.0, 0.1, cosine) for m, cosine in enumerate(cosines)]
        assert not guard.judge(0, offers).left_out


@pytest.mark.parametrize("fragments", [1, 12])
def test_one_turn_of_odd_data_is_not_held_against_a_learner_and_more_are(fragments, guard):

    def turn(cosine):
        offers = [Offered(m, 24, 1.0, 0.1, 0.4 if m else cosine) for m in range(4)]
        return [guard.judge(p, offers).left_out for p in range(fragments)]

    for cosine in (0.4, 0.3, 0.4, -0.3, 0.35, 0.4):
        assert not any(turn(cosine))
    found = [away for _ in range(max(3, 24 // fragments)) for away in turn(-0.4)]
    assert found[-1] == {0}


# Cosines on a sample of elements that nobody can foresee.


def deltas(seed, shapes, count):
    rng = np.random.default_rng(seed)
    shared = [rng.standard_normal(shape) for shape in shapes]
    return [[(x + rng.standard_normal(x.shape)).astype(np.float32) for x in shared] for _ in range(count)]


def cosines_of(sent, norms, anchor):
    """The guard's, of offers that are parameters."""
    sizes = [piece.size for piece in anchor]
    lines = sample_lines(sizes, norms)
    sampler = OfferSampler([piece.shape for piece in anchor], sample_counts(sizes))
    rows = [sampler("f32", pieces, lines) for pieces in sent]
    sampled = sampler("f32", anchor, lines) - np.stack(rows)
    cosines = sampled_cosines(sampled.__getitem__, len(sent), draw_witnesses(norms))
    np.fill_diagonal(cosines, 1.0)  # where it says nothing: of each with itself
    return cosines


def exact(vectors):
    rows = np.stack([np.concatenate([piece.ravel() for piece in v]) for v in vectors]).astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1)
    return rows @ rows.T / np.outer(lengths, lengths)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 5]))
def test_of_a_small_fragment_they_are_exact(seed, count):
    shapes = [(7, 11), (3,), ()]
    vectors = deltas(seed, shapes, count)
    anchor = [np.full(shape, 0.25, np.float32) for shape in shapes]
    sent = [[a - x for a, x in zip(anchor, v, strict=True)] for v in vectors]
    cosines = cosines_of(sent, np.ones((3, count), np.float32), anchor)
    np.testing.assert_allclose(cosines, exact(vectors), atol=1e-6)


def test_of_a_large_fragment_they_are_within_the_noise_of_a_sample_and_follow_from_the_norms():
    shapes = [(1000, 400), (5,), (300, 1000)]
    vectors = deltas(0, shapes, 3)
    anchor = [np.zeros(shape, np.float32) for shape in shapes]
    sent = [[-x for x in v] for v in vectors]
    norms = np.float32([[np.linalg.norm(piece) for piece in column] for column in zip(*vectors, strict=True)])
    cosines = cosines_of(sent, norms, anchor)
    assert np.abs(cosines - exact(vectors)).max() < 5 / np.sqrt(SAMPLE)
    again = cosines_of(sent, norms, anchor)
    np.testing.assert_array_equal(cosines, again)
    other = norms.copy()
    other[0, 1] = np.nextafter(other[0, 1], np.float32(np.inf))
    assert (cosines_of(sent, other, anchor)[0] != cosines).any()


def test_in_a_large_round_each_is_compared_with_some_and_the_odd_one_is_still_found():
    count, odd = 3 * WITNESSES + 7, 100
    vectors = np.stack([v[0] for v in deltas(1, [(2000,)], count)])
    vectors[odd] *= -1
    norms = np.linalg.norm(vectors, axis=1)[None]
    drawn, samples = draw_witnesses(norms), []

    def sampled(m):
        samples.append(m)
        return vectors[m].astype(np.float64)

    cosines = sampled_cosines(sampled, count, drawn)
    assert sorted(samples) == list(range(count))
    expected = exact([[v] for v in vectors])
    np.fill_diagonal(expected, np.nan)
    np.testing.assert_allclose(cosines, expected[:, drawn], atol=1e-6)
    found = offered(range(count), [(1, 1)] * count, norms, [2000], cosines)
    assert list(direction(found, Past())) == [odd]
    assert found[0].cosine == np.nanmedian(expected[0, drawn])


def test_whoever_did_not_move_has_no_direction():
    anchor = [np.ones(4, np.float32)]
    sent = [[np.ones(4, np.float32)], [np.zeros(4, np.float32)]]
    cosines = cosines_of(sent, np.float32([[0, 2]]), anchor)
    assert np.isnan(cosines[0, 1])
    assert cosines[1, 1] == pytest.approx(1)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.5, -3.0]), min_size=3, max_size=12))
def test_the_median_of_the_others_is_that_without_the_value_itself(values):
    others = [values[:i] + values[i + 1 :] for i in range(len(values))]
    assert medians_of_others(np.array(values)).tolist() == [statistics.median(rest) for rest in others]
    high = medians_of_others(np.array(values), high=True).tolist()
    assert high == [statistics.median_high(rest) for rest in others]
