"""Steps of five minutes, and links on which a fragment takes longer than anybody may be silent."""

import pytest

from tests.virtual_runs import run_timed, virtual

BYTES = 4 * 10_656  # of all parameters, in float32


@pytest.mark.parametrize("algorithm", ["decoupled", "streaming"])
def test_in_steps_of_five_minutes_nothing_is_sent_twice(algorithm, data_dir):
    run = run_timed(virtual(data_dir, algorithm, virtual={"step_seconds": (300.0, 310.0), "latency": (0.1,)}))
    assert run.outcome.finished
    assert len(run.noted("round")) >= 3
    assert [drop["reason"] for drop in run.noted("drop")] == []


def test_who_sends_a_fragment_for_longer_than_the_silence_is_heard_all_the_same(data_dir):
    thin = {"step_seconds": (30.0,), "bandwidth": (BYTES / 100,)}  # 100 s for all parameters
    run = run_timed(virtual(data_dir, "diloco", virtual=thin))
    assert run.experiment.sync.silence_timeout < 100
    assert run.outcome.finished
    rounds = run.noted("round")
    assert len(rounds) == run.experiment.train.steps // run.experiment.sync.interval
    assert {len(r["learners"]) for r in rounds} == {2}
    assert run.noted("silent") == []
