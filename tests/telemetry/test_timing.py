"""What a change of the timing has gained, by the rounds before and after it."""

import pytest

from ddiloco.telemetry.loss_estimate import ERROR
from ddiloco.telemetry.records import Noted
from ddiloco.telemetry.state import RunState, summarize
from ddiloco.telemetry.timing import ROUNDS, TimingLog
from tests.telemetry.monitor_script import step

SET = {"step": 96, "shard": 0, "interval": 12, "overlap": 2, "quorum": 1, "gamma": 0.8, "max_grace": 1.0}


def test_after_as_many_rounds_it_is_told_what_a_change_has_gained():
    log = TimingLog()
    for _ in range(ROUNDS):
        assert log.add(24.0, 1.0, 1.0) is None
    log.set({**SET, "reason": "plan: -1.0%"})
    log.set({**SET, "shard": 1, "reason": "plan: -1.0%"})
    found = [log.add(12.0, 0.5, 1.0) for _ in range(ROUNDS + 5)]
    told = {"step": 96, "reason": "plan: -1.0%", "gained_percent": 1.0, "error": ERROR}
    assert found == [None] * (ROUNDS - 1) + [told] + [None] * 5


def test_a_change_with_too_few_rounds_before_it_is_not_judged():
    log = TimingLog()
    log.add(24.0, 1.0, 1.0)
    log.set(SET)
    assert {log.add(12.0, 0.5, 1.0) for _ in range(2 * ROUNDS)} == {None}


def test_the_runs_state_has_the_timing_and_the_outcome_of_its_change(run_info):
    state = RunState(run_info(1, num_fragments=1, total_steps=500), 0.0)

    def rounds(first, work):
        for number in range(first, first + ROUNDS):
            state.apply(step(0, number, float(number)))
            values = {"step": number, "fragment": 0, "quorum": 1, "live": 1, "learners": [0]}
            given = [[0, 1, 0, number, work, 100]]
            state.apply(Noted("round", {**values, "contributions": given}, float(number)))

    rounds(1, 24)
    assert summarize(state, 50.0, [])["timing"] is None
    state.apply(Noted("timing_set", {**SET, "reason": "links"}, 50.0))
    rounds(51, 12)
    assert summarize(state, 99.0, [])["timing"]["interval"] == 12
    set_at, effect = [line for line in state.events if line["event"].startswith("timing")]
    assert (set_at["reason"], effect["reason"]) == ("links", "links")
    assert effect["gained_percent"] == pytest.approx(0.96)
