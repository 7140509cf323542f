"""Steps of five minutes, and links on which a fragment takes longer than anybody may be silent."""

import pytest

from ddiloco.protocol.policy import SyncPolicy
from ddiloco.run.job import with_steps
from ddiloco.run.recipes import assembly_of
from ddiloco.virtual.links import LinkQuality
from tests.virtual.small_fleet import small_fleet
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


def test_after_a_restart_of_the_syncer_who_has_a_slow_link_is_left_out_of_one_round_at_most():
    all_in = SyncPolicy(num_learners=2, num_fragments=1, interval=20, overlap=0, quorum=None, max_run_ahead=0)
    fleet, told = small_fleet(all_in, 400, sizes=(15_000,))
    for link in (fleet.places[1].up, fleet.places[1].down):
        link.quality = LinkQuality(bandwidth=100.0)  # 150 s for what may be 60 s late
    fleet.run(stop=lambda: fleet.calendar.now > 700)
    fleet.syncer.crash()
    fleet.syncer.restart()
    fleet.run(max_events=20_000)
    assert fleet.over
    merged = [values["learners"] for time, values in told.of("round") if time > 700]
    assert len(merged) > 5
    assert [0] not in merged[2:], merged
