"""Cosines on a sample of elements that nobody can foresee."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.outer.guards import SAMPLE, sampled_cosines


def deltas(seed, shapes, count):
    rng = np.random.default_rng(seed)
    shared = [rng.standard_normal(shape) for shape in shapes]
    return [[(x + rng.standard_normal(x.shape)).astype(np.float32) for x in shared] for _ in range(count)]


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
    cosines = sampled_cosines(anchor, sent, np.ones((3, count), np.float32))
    np.testing.assert_allclose(cosines, exact(vectors), atol=1e-6)


def test_of_a_large_fragment_they_are_within_the_noise_of_a_sample_and_follow_from_the_norms():
    shapes = [(1000, 400), (5,), (300, 1000)]
    vectors = deltas(0, shapes, 3)
    anchor = [np.zeros(shape, np.float32) for shape in shapes]
    sent = [[-x for x in v] for v in vectors]
    norms = np.float32([[np.linalg.norm(piece) for piece in column] for column in zip(*vectors, strict=True)])
    cosines = sampled_cosines(anchor, sent, norms)
    assert np.abs(cosines - exact(vectors)).max() < 5 / np.sqrt(SAMPLE)
    again = sampled_cosines(anchor, sent, norms)
    np.testing.assert_array_equal(cosines, again)
    other = norms.copy()
    other[0, 1] = np.nextafter(other[0, 1], np.float32(np.inf))
    assert (sampled_cosines(anchor, sent, other)[0] != cosines).any()


def test_whoever_did_not_move_has_no_direction():
    anchor = [np.ones(4, np.float32)]
    sent = [[np.ones(4, np.float32)], [np.zeros(4, np.float32)]]
    cosines = sampled_cosines(anchor, sent, np.float32([[0, 2]]))
    assert np.isnan(cosines[0, 1])
    assert cosines[1, 1] == pytest.approx(1)
