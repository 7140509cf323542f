"""Steps of five minutes, and links on which a fragment takes longer than anybody may be silent."""

import pytest

from ddiloco.run.job import with_steps
from ddiloco.run.recipes import assembly_of
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


@pytest.mark.parametrize("train", [{"steps": 12}, {"tokens": 12 * 2 * 2 * 32}], ids=["steps", "tokens"])
def test_rounds_that_take_many_times_their_steps_are_waited_for(train, data_dir):
    slow = {"step_seconds": (0.01,), "latency": (60.0,), "bandwidth": (1e4,), "merge_seconds": 20.0}
    e = virtual(data_dir, "diloco", virtual=slow, train=train)
    run = run_timed(with_steps(e, lambda: assembly_of(e)))
    assert run.outcome.finished, run.outcome.failure
    assert len(run.noted("round")) == 3
    assert run.seconds > 3 * (2 * 60 + 2 * BYTES / 1e4 + 20)
