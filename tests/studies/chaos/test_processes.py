"""The plan of what befalls real processes: a function of the seed, and as dense as the settings say."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import chaos_processes
from ddiloco.config import ConfigError, build
from experiments.studies.chaos.processes import KINDS, SYNCER, ProcessChaos, draw_plan

plans = st.builds(
    ProcessChaos,
    seed=st.integers(0, 10**6),
    steady_seconds=st.floats(0, 20),
    seconds=st.floats(0, 300),
    learner_every=st.floats(1, 100),
    syncer_every=st.none() | st.floats(1, 100),
    spared_seconds=st.floats(0, 10),
    hang_share=st.floats(0, 0.5),
    partition_share=st.floats(0, 0.5),
)


@given(plans, st.integers(1, 8))
def test_a_plan_keeps_to_its_settings(chaos, learners):
    plan = draw_plan(chaos, learners)
    assert plan == draw_plan(chaos, learners)
    assert [f.time for f in plan] == sorted(f.time for f in plan)
    for fault in plan:
        assert chaos.steady_seconds <= fault.time <= chaos.steady_seconds + chaos.seconds
        assert fault.kind in KINDS
        mean = {"kill": 0.0, "hang": chaos.hang_seconds, "partition": chaos.partition_seconds}[fault.kind]
        assert 0.5 * mean <= fault.duration <= 1.5 * mean
    of_syncer = [f for f in plan if f.target == SYNCER]
    assert all(f.kind != "partition" for f in of_syncer)
    assert len(of_syncer) == (int(chaos.seconds / chaos.syncer_every) if chaos.syncer_every else 0)
    of_learners = [f for f in plan if f.target != SYNCER]
    most = int(chaos.seconds / (chaos.learner_every / learners))
    assert len(of_learners) <= most
    assert len(of_learners) == most or of_syncer
    for fault in of_learners:
        assert all(fault.time - f.time >= chaos.spared_seconds or fault.time < f.time for f in of_syncer)


@given(plans, st.integers(3, 8))
def test_a_learner_is_spared_while_others_have_their_turn(chaos, learners):
    unspared = dataclasses.replace(chaos, syncer_every=None)
    targets = [f.target for f in draw_plan(unspared, learners)]
    for i in range(len(targets)):
        turn = targets[i : i + learners - 1]
        assert len(set(turn)) == len(turn)


def test_shares_beyond_everything_are_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"^chaos\.hang_share: is 0\.6, but with partition_share, 0\.5, "):
        build(ProcessChaos, {"hang_share": 0.6, "partition_share": 0.5}, "chaos")


@pytest.mark.parametrize("preset", chaos_processes.SECONDS)
def test_a_preset_is_complete_and_its_faults_end_before_its_steps(preset):
    given = chaos_processes.get_chaos(preset)
    assert set(given) == set(ProcessChaos.__dataclass_fields__)
    config = chaos_processes.get_config(preset)
    plan = draw_plan(build(ProcessChaos, given, "chaos"), config.sync.num_learners - given.hostile)
    shortest = config.train.steps * chaos_processes.STEP_SECONDS
    assert plan
    assert plan[-1].time + plan[-1].duration < shortest
