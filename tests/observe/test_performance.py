"""Quantiles in bounded memory, and what the metrics of steps say of speed, data and memory."""

import numpy as np
import pytest

from ddiloco.observe import performance
from ddiloco.observe.performance import Performance


def learner(*steps):
    found = Performance()
    for metrics in steps:
        found.add(metrics)
    return found


def test_quantiles_are_within_a_percent_of_the_exact_ones():
    seconds = np.random.default_rng(0).lognormal(-3.0, 2.0, 5001)
    figures = learner(*({"step_seconds": one} for one in seconds)).figures()
    for name, share in {"step_seconds_p50": 0.5, "step_seconds_p99": 0.99}.items():
        exact = np.quantile(seconds, share, method="inverted_cdf")
        assert figures[name] == pytest.approx(exact, rel=0.01)


def test_of_no_step_nothing_is_known():
    found = performance.summary({0: Performance(), 1: learner({"loss": 1.0})})
    assert found["mfu"] is found["step_seconds_p50"] is found["data_wait_share"] is None
    assert found["step_seconds_p99_by_learner"] == {0: None, 1: None} and found["peak_memory_bytes"] == {}


def test_a_step_weighs_as_much_as_it_took():
    fast = learner(*[{"step_seconds": 1.0, "data_wait_seconds": 0.5, "mfu": 0.4}] * 2)
    slow = learner({"step_seconds": 2.0, "data_wait_seconds": 0.0, "mfu": 0.2}, {"peak_bytes/3": 7.0})
    found = performance.summary({0: fast, 1: slow})
    assert found["mfu"] == pytest.approx(0.3) and found["mfu_by_learner"] == pytest.approx({0: 0.4, 1: 0.2})
    assert found["data_wait_share"] == pytest.approx(0.25)
    assert found["step_seconds_p50"] == pytest.approx(1.0, rel=0.01)
    assert found["step_seconds_p99_by_learner"][1] == pytest.approx(2.0, rel=0.01)
    assert found["peak_memory_bytes"] == {1: {"3": 7}}


def test_the_newest_peak_of_a_device_counts():
    assert learner({"peak_bytes/0": 5.0, "peak_bytes/1": 3.0}, {"peak_bytes/0": 6.0}).peak_bytes == {
        "0": 6,
        "1": 3,
    }
