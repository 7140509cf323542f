"""Merge rules against float64, and the invariants that the paper claims for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddiloco.outer.merging import DEGENERATE, MERGE_RULES, Sent, contribution_weight, norm_of, normalised

RULES = {name: jax.jit(lambda *sent, rule=rule: rule(Sent(*sent))) for name, rule in MERGE_RULES.items()}
EXACT = sorted(set(RULES) - {"geometric_median"})  # which is found by iteration
SEEDS = st.integers(0, 2**32 - 1)


def reference(name, vectors, weights):
    """The rules in float64, after the paper's formulas."""
    v = [np.asarray(x, np.float64) for x in vectors]
    w = np.asarray(weights, np.float64)
    w = w / w.sum() if w.sum() > 0 else w
    average = sum(wm * vm for wm, vm in zip(w, v, strict=True))
    if name == "direct":
        return average
    norms = np.array([np.linalg.norm(x) for x in v])
    if name == "clipped":
        order = np.argsort(norms)
        longest = norms[order][np.argmax(np.cumsum(w[order]) >= 0.5)]
        return sum(wm * vm * min(1, longest / n) for wm, vm, n in zip(w, v, norms, strict=True))
    if name == "trimmed":
        cut = min(-(-len(v) // 4), (len(v) - 1) // 2)
        return np.sort(v, axis=0)[cut : len(v) - cut].mean(0)
    assert name == "rda", f"the rule {name} has no float64 formula here yet"
    pointing = [(wm, x / n) for wm, x, n in zip(w, v, norms, strict=True) if wm > 0 and n > 0]
    if not pointing:
        return average
    mean = sum(wm * phi for wm, phi in pointing) / sum(wm for wm, _ in pointing)
    length = np.linalg.norm(mean)
    return average if length < DEGENERATE else np.dot(w, norms) * mean / length


def relative_error(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


def draw(seed, num_learners, shape=(7, 11)):
    rng = np.random.default_rng(seed)
    vectors = [rng.standard_normal(shape) * 10.0 ** rng.uniform(-4, 2) for _ in range(num_learners)]
    return [x.astype(np.float32) for x in vectors], rng.uniform(0.1, 5, num_learners).astype(np.float32)


@settings(max_examples=30)
@given(SEEDS, st.sampled_from([(1, False), (2, True), (5, False), (5, True)]), st.sampled_from(EXACT))
def test_rules_equal_their_float64_formulas(seed, kind, name):
    """With an anchor outer gradients are the anchor minus parameters."""
    num_learners, with_anchor = kind
    deltas, weights = draw(seed, num_learners)
    anchor = np.random.default_rng(seed).standard_normal((7, 11)).astype(np.float32) if with_anchor else None
    vectors = [anchor - x for x in deltas] if with_anchor else deltas
    deltas = [anchor - x for x in vectors] if with_anchor else deltas
    merged = RULES[name](vectors, weights, anchor)
    want = reference(name, deltas, weights)
    assert relative_error(merged.value, want) < 3e-6
    assert merged.length == pytest.approx(np.linalg.norm(want), rel=1e-5)
    np.testing.assert_allclose(merged.norms, [np.linalg.norm(x) for x in deltas], rtol=1e-6)


def along(*axes):
    """Vectors of the shape that all rules are compiled for, each the sum of some axes times a number."""
    vectors = np.zeros((len(axes), 77), np.float32)
    for vector, numbers in zip(vectors, axes, strict=True):
        vector[list(numbers)] = list(numbers.values())
    return list(vectors.reshape(-1, 7, 11))


@settings(max_examples=20)
@given(SEEDS, st.sampled_from([0.0, 1.0, -1e30, 3e38]), st.booleans(), st.sampled_from(sorted(RULES)))
def test_merge_with_one_silent_learner_weights_it_zero(seed, held, with_anchor, name):
    vectors, weights = draw(seed, 5)
    anchor = np.full_like(vectors[0], 0.5) if with_anchor else None
    silent = [*vectors[:4], np.full_like(vectors[0], held)]
    weights[4] = 0
    merged = RULES[name](silent, weights, anchor)
    want = RULES[name]([*vectors[:4], vectors[0]], weights, anchor)
    np.testing.assert_array_equal(merged.value, want.value)
    np.testing.assert_array_equal(merged.norms, want.norms)
    assert merged.cosine == want.cosine


@pytest.mark.parametrize("name", sorted(RULES))
def test_nobody_in_and_nobody_moved_give_zero_and_of_a_single_learner_the_cosine_is_one(name):
    vectors, _ = draw(0, 5)
    absent = RULES[name](vectors, np.zeros(5, np.float32))
    assert (np.asarray(absent.value) == 0).all() and absent.length == 0
    still = RULES[name]([np.zeros_like(vectors[0])] * 5, np.ones(5, np.float32))
    assert (np.asarray(still.value) == 0).all() and np.isfinite(still.cosine)
    assert RULES[name](vectors, np.float32([0, 2, 0, 0, 0])).cosine == 1


def test_a_learner_that_did_not_move_shortens_rda_but_turns_neither_it_nor_its_cosine():
    vectors, weights = draw(5, 4)
    vectors.append(np.zeros_like(vectors[0]))
    beside = RULES["rda"](vectors, np.append(weights, np.float32(weights.sum())))
    alone = RULES["rda"](vectors, np.append(weights, np.float32(0)))
    np.testing.assert_allclose(beside.value, np.asarray(alone.value) / 2, rtol=1e-5)
    assert float(beside.cosine) == pytest.approx(float(alone.cosine), rel=1e-4)


def test_rda_of_opposite_learners_falls_back_to_the_direct_average():
    [v] = draw(0, 1)[0]
    vectors = [v, -3 * v]
    merged = RULES["rda"](vectors, np.ones(2, np.float32))
    assert relative_error(merged.value, reference("direct", vectors, [1, 1])) < 1e-6
    assert merged.length == pytest.approx(np.linalg.norm(v), rel=1e-5)


def test_rda_just_above_the_degenerate_bound_is_not_the_direct_average():
    vectors = along({0: 1, 1: 2.5 * DEGENERATE}, {0: -3})
    want = reference("rda", vectors, [1, 1])
    assert np.linalg.norm(want) == pytest.approx(2, rel=1e-3)
    assert relative_error(RULES["rda"](vectors, np.ones(2, np.float32)).value, want) < 1e-3


@pytest.mark.parametrize(
    ("size", "opposite"),
    [(2**20, True), *(pytest.param(2**24, x, marks=pytest.mark.slow) for x in (True, False))],
)
def test_rda_of_up_to_sixteen_million_elements_is_within_1e_5_of_float64(size, opposite):
    rng = np.random.default_rng(1)
    v = rng.standard_normal(size, dtype=np.float32)
    noise = rng.standard_normal(size, dtype=np.float32)
    vectors = [v, np.float32(0.02) * noise - v if opposite else noise]  # cosine -0.9998 or 0
    weights = np.ones(2, np.float32)
    merged = RULES["rda"](vectors, weights)
    norms = [np.linalg.norm(x.astype(np.float64)) for x in vectors]
    mean = sum(x.astype(np.float64) / n for x, n in zip(vectors, norms, strict=True)) / 2
    want = np.mean(norms) * mean / np.linalg.norm(mean)
    assert relative_error(merged.value, want) < 1e-5
    np.testing.assert_allclose(merged.norms, norms, rtol=1e-6)


@settings(max_examples=20)
@example(19041264, 2)  # one vector 55,000 times as long as the other
@given(SEEDS, st.sampled_from([2, 5]))
def test_cosine_is_the_mean_over_pairs_of_learners(seed, num_learners):
    vectors, weights = draw(seed, num_learners)
    shares = weights.astype(np.float64)
    v = np.stack([x.ravel() for x in vectors]).astype(np.float64)
    cosines = (v @ v.T) / np.outer(np.linalg.norm(v, axis=1), np.linalg.norm(v, axis=1))
    pairs = np.outer(shares, shares) * (1 - np.eye(num_learners))
    assert RULES["rda"](vectors, weights).cosine == pytest.approx(
        (pairs * cosines).sum() / pairs.sum(), abs=2e-4
    )
    products = pairs * np.outer(np.linalg.norm(v, axis=1), np.linalg.norm(v, axis=1))
    want = (products * cosines).sum() / products.sum()
    own = np.sum((shares * np.linalg.norm(v, axis=1)) ** 2)  # of which the rest is a difference, in float32
    rounding = 2e-4 + 3e-6 * own / products.sum()
    assert RULES["direct"](vectors, weights).cosine == pytest.approx(want, abs=rounding)


@pytest.mark.parametrize("name", ["direct", "rda"])
def test_no_array_of_all_outer_gradients_is_ever_stored(name):
    piece = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    compiled = RULES[name].lower([piece] * 8, jax.ShapeDtypeStruct((8,), jnp.float32), piece).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 512 * 512 * 4 + 2**16


# Rules that bound what one learner can do to a merge.

ROBUST = ("clipped", "trimmed", "geometric_median")


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
    given_norms = RULES[name](
        vectors, weights, anchor, jax.numpy.stack([norm_of(vector, anchor) for vector in vectors])
    )
    np.testing.assert_allclose(given_norms.value, alone.value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(given_norms.norms, alone.norms, rtol=1e-6)


# Weights of contributions.


def test_a_weight_is_tokens_times_tokens_a_step_and_nothing_without_either():
    assert contribution_weight(24, 24 * 2**22) == 24 * 2.0**44
    assert contribution_weight(24, 240, interval=24) == contribution_weight(48, 480, interval=24) == 2400
    assert contribution_weight(12, 120, interval=24) == 1200
    assert contribution_weight(0, 0) == contribution_weight(0, 7) == contribution_weight(3, 0) == 0
    with pytest.raises(ValueError, match="c_steps is -1"):
        contribution_weight(-1, 5)


@given(st.lists(st.floats(0, 1e15), min_size=1, max_size=16))
def test_normalised_weights_sum_to_one_and_keep_their_ratios(weights):
    shares = normalised(weights)
    assert shares.dtype == np.float32
    if sum(weights) == 0:
        assert (shares == 0).all()
    else:
        assert shares.sum() == pytest.approx(1, abs=1e-5)
        np.testing.assert_allclose(shares, np.array(weights) / sum(weights), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_weights_that_are_none_are_refused(bad):
    with pytest.raises(ValueError, match="must be finite and not negative"):
        normalised([1.0, bad])
