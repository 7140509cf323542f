"""Which inner states of peers a learner takes for honest."""

import numpy as np
import pytest

from ddiloco.remote.learner.likeness import Comparison
from ddiloco.workers.exchange import InnerState


def state(count, filled, scale=1.0):
    """Two moments, a count of skipped steps, and a sum of gradients that may just have been used."""
    moments = np.linspace(-1, 1, 99, dtype=np.float32) * scale, np.full(99, scale, np.float32)
    summed = np.linspace(-2, 2, 99, dtype=np.float32) * filled
    return InnerState(500, (), [*moments, np.asarray(count, np.int32), summed], trained=500)


@pytest.mark.parametrize(("own", "peer"), [((0, 0.0), (3, 1.0)), ((3, 1.0), (0, 0.5)), ((0, 0.0), (0, 0.0))])
def test_a_count_or_a_sum_that_is_0_is_held_against_no_peer(own, peer):
    comparison = Comparison(state(*own))
    assert comparison.agrees(state(*peer))
    assert not comparison.agrees(state(*peer, scale=1e6)) and not comparison.agrees(state(*peer, scale=-1.0))
    assert not comparison.agrees(state(10**6, 1.0))
