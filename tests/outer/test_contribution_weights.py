"""Weights of contributions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.outer.merging import contribution_weight, normalised


def test_weight_is_quantity_times_tokens_a_step():
    assert contribution_weight(4, 1000) == 1000 * 250
    assert contribution_weight(24, 24 * 2**22) == 24 * 2.0**44


def test_learner_without_a_step_or_without_a_token_weighs_nothing():
    assert contribution_weight(0, 0) == 0
    assert contribution_weight(0, 7) == 0
    assert contribution_weight(3, 0) == 0


def test_negative_counts_are_refused():
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
