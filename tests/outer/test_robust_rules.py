"""The rules that bound what one learner can do to a merge."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.outer.merging import norms_of
from tests.outer.test_merging import RULES

ROBUST = ("clipped", "trimmed", "geometric_median")
SEEDS = st.integers(0, 2**32 - 1)


def honest(seed, num_learners, shape=(7, 11)):
    """Outer gradients of about one length that agree a little, as those of learners do."""
    rng = np.random.default_rng(seed)
    shared = rng.standard_normal(shape)
    return [(shared + rng.standard_normal(shape)).astype(np.float32) for _ in range(num_learners)]


def distances(point, vectors, weights):
    return sum(w * np.linalg.norm(point - v) for w, v in zip(weights, vectors, strict=True))


@settings(max_examples=30)
@given(SEEDS, st.sampled_from(ROBUST), st.sampled_from([1e3, -1e3, 1e6, -1e15]))
def test_one_of_eight_cannot_move_the_result_further_than_honest_learners_are_apart(seed, name, factor):
    vectors = honest(seed, 8)
    weights = np.ones(8, np.float32)
    truth = np.mean(vectors[:7], axis=0)
    lied = [*vectors[:7], (vectors[7].astype(np.float64) * factor).astype(np.float32)]
    off = np.linalg.norm(np.asarray(RULES[name](lied, weights).value, np.float64) - truth)
    apart = max(np.linalg.norm(v - truth) for v in vectors[:7])
    assert off < apart
    moved = np.linalg.norm(np.asarray(RULES["direct"](lied, weights).value, np.float64) - truth)
    assert moved > 10 * apart


@settings(max_examples=20)
@given(SEEDS, st.sampled_from([5, 8]))
def test_no_point_near_the_geometric_median_is_closer_to_all(seed, num_learners):
    rng = np.random.default_rng(seed)
    vectors = [v.astype(np.float64) for v in honest(seed, num_learners)]
    weights = rng.uniform(0.5, 2, num_learners)
    found = np.asarray(
        RULES["geometric_median"]([v.astype(np.float32) for v in vectors], weights.astype(np.float32)).value,
        np.float64,
    )
    best = distances(found, vectors, weights)
    for step in (1e-1, 1e-2):
        for _ in range(10):
            aside = rng.standard_normal(found.shape)
            assert distances(found + step * aside, vectors, weights) > best * (1 - 1e-4)
    assert best <= min(distances(v, vectors, weights) for v in vectors) * (1 + 1e-3)


def test_the_geometric_median_of_three_points_with_equal_angles_is_fermats():
    angles = 2 * np.pi * np.arange(3) / 3
    corners = [np.float32([5 + np.cos(a), 2 + np.sin(a)]) for a in angles]
    merged = RULES["geometric_median"](corners, np.ones(3, np.float32))
    np.testing.assert_allclose(merged.value, [5, 2], atol=1e-4)


def test_the_geometric_median_of_opposite_quarters_is_the_heavier_learner():
    vectors = [np.float32([1, 0]), np.float32([0, 1])]
    merged = RULES["geometric_median"](vectors, np.float32([3, 1]))
    np.testing.assert_allclose(merged.value, [1, 0], atol=1e-3)


@pytest.mark.parametrize("count, cut", [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (8, 2)])
def test_a_quarter_is_trimmed_at_each_end_and_never_all(count, cut):
    values = np.arange(count, dtype=np.float32) ** 3
    vectors = [np.float32([v]) for v in np.random.default_rng(0).permutation(values)]
    absent = [*vectors, *[np.float32([3e38])] * (9 - count)]
    merged = RULES["trimmed"](absent, np.float32([*[2.0] * count, *[0] * (9 - count)]))
    assert merged.value[0] == pytest.approx(values[cut : count - cut].mean())


@pytest.mark.parametrize("name", sorted(RULES))
def test_norms_that_are_given_are_used_as_if_they_had_been_computed(name):
    vectors, weights = honest(1, 5), np.float32([1, 2, 0, 1, 1])
    anchor = np.full_like(vectors[0], 0.5)
    alone = RULES[name](vectors, weights, anchor)
    given_norms = RULES[name](vectors, weights, anchor, norms_of(vectors, anchor))
    np.testing.assert_allclose(given_norms.value, alone.value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(given_norms.norms, alone.norms, rtol=1e-6)
