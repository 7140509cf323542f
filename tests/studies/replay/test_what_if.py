"""The same steps under another policy: what the run would have come to, against runs that had that policy."""

import dataclasses

import pytest

from ddiloco.outer.encoding import Traffic
from experiments.studies.replay import plan as plans
from experiments.studies.replay.reading import read_run
from experiments.studies.replay.what_if import recorded, recorded_fleet, what_if
from tests.workbook import POLICY, fleet_tapes, lose

STEPS = 60


def plan_of(workdir, policy, changes=(), **fleet):
    fleet_tapes(workdir, policy, STEPS, changes, **fleet)
    return plans.make_plan(read_run(workdir), policy, STEPS)


@pytest.fixture(scope="module")
def quorum_of_one(tmp_path_factory):
    return plan_of(tmp_path_factory.mktemp("one"), POLICY)


def test_delays_are_those_of_the_run(quorum_of_one):
    found = recorded_fleet(quorum_of_one, Traffic((1, 1), ((1, 1),), (1, 1))).took
    assert found.offers == {m: pytest.approx(0.1) for m in range(3)}
    assert found.merge == pytest.approx(0.2)
    assert all(0.05 <= update < 0.5 for update in found.updates.values())


def test_what_was_recorded_is_summed_up(quorum_of_one):
    outcome = recorded(quorum_of_one)
    assert outcome.merged == len(quorum_of_one.merges[0])
    given = [len(work.given) for work in quorum_of_one.merges[0]]
    assert outcome.contributions == pytest.approx(sum(given) / len(given))
    tokens = sum(c.tokens for work in quorum_of_one.merges[0] for c, _ in work.given)
    assert outcome.tokens == tokens


def test_under_the_policy_of_the_run_it_comes_to_nearly_the_same(quorum_of_one):
    was, again = recorded(quorum_of_one), what_if(quorum_of_one, POLICY, STEPS)
    assert again.merged == pytest.approx(was.merged, rel=0.15)
    assert again.contributions == pytest.approx(was.contributions, rel=0.15)
    assert again.tokens == pytest.approx(was.tokens, rel=0.15)


def test_work_that_learners_keep_after_an_update_is_counted_once(tmp_path):
    policy = dataclasses.replace(POLICY, rebase=True)
    plan = plan_of(tmp_path, policy)
    was, again = recorded(plan), what_if(plan, policy, STEPS)
    assert again.merged == pytest.approx(was.merged, rel=0.15)
    assert again.tokens == pytest.approx(was.tokens, rel=0.05)
    overwritten = what_if(plan, POLICY, STEPS)
    assert overwritten.tokens < again.tokens


def test_steps_are_counted_once_where_every_fragment_has_an_update_between_two_reports(tmp_path):
    whole = dataclasses.replace(POLICY, num_fragments=1, rebase=True)
    plan = plan_of(tmp_path, whole)
    # All work until the end in one merge, which is that of all steps: nobody's clock is set before.
    never = dataclasses.replace(whole, interval=STEPS, quorum=3)
    would = what_if(plan, never, STEPS)
    assert (would.merged, would.contributions, would.tokens) == (1, 3.0, 10 * 3 * STEPS)


def test_offers_that_the_guard_left_out_are_left_out_again(tmp_path):
    plan = plan_of(tmp_path, POLICY, left_out=(1,))
    was, again = recorded(plan), what_if(plan, POLICY, STEPS)
    assert was.contributions < 2.1
    assert again.merged == pytest.approx(was.merged, rel=0.15)
    assert again.contributions == pytest.approx(was.contributions, rel=0.15)
    assert again.tokens == pytest.approx(was.tokens, rel=0.15)


def test_a_quorum_of_all_merges_all_and_waits_longer(quorum_of_one):
    would = what_if(quorum_of_one, dataclasses.replace(POLICY, quorum=3), STEPS)
    assert would.contributions == 3.0
    assert would.quorum_seconds > 2 * recorded(quorum_of_one).quorum_seconds


def test_a_run_whose_syncer_was_several_processes_is_asked_in_the_same_way(tmp_path):
    plan = plan_of(tmp_path, POLICY, lose(1, 12.0, 15.0), shards=2)
    was, again = recorded(plan), what_if(plan, POLICY, STEPS)
    assert was.merged == sum(map(len, plan.merges))
    assert again.merged == pytest.approx(was.merged, rel=0.15)
    assert again.contributions == pytest.approx(was.contributions, rel=0.2)
    would = what_if(plan, dataclasses.replace(POLICY, quorum=3), STEPS)
    assert would.contributions > was.contributions and would.quorum_seconds > was.quorum_seconds
