"""What happened in a run, in order of time: clocks grow along each actor, and lines can be chosen."""

import itertools

import pytest

from experiments.cli.program import UsageError
from experiments.studies.replay import plan as plans
from experiments.studies.replay.order import perform
from experiments.studies.replay.reading import read_run
from experiments.studies.replay.timeline import (
    ReplayClocks,
    VectorClock,
    chosen,
    clock_text,
    shown,
    timeline,
)
from experiments.studies.replay.works import BEFORE
from tests.refusals import refusal
from tests.workbook import POLICY, fleet_tapes, lose


def is_consistent_cut(syncer, learners):
    """Whether none of these states holds work that its owner has yet to do."""
    known = syncer
    for own in learners.values():
        known = VectorClock({**known.learners}, {**syncer.versions}).joined(own)
    mine = {m: own.learners.get(m) for m, own in learners.items()}
    return known.versions == syncer.versions and all(known.learners.get(m) == at for m, at in mine.items())


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Of a run in which learner 1 dies and comes back."""
    workdir = tmp_path_factory.mktemp("run")
    fleet_tapes(workdir, steps=40, changes=lose(1, 12.0, 15.0))
    return plans.make_plan(read_run(workdir), POLICY, 40)


def test_clocks_only_grow_along_an_actor_and_any_prefix_of_the_plans_order_is_a_consistent_cut(plan):
    clocks, done = ReplayClocks(plan), []
    perform(plan, lambda actor, work: done.append((actor, work)))
    newest = {id(actor): VectorClock() for actor in plan.actors}
    [syncer] = plan.syncers
    learners = dict.fromkeys(range(POLICY.num_learners), VectorClock())
    after = {id(actor): list(clocks.after(actor)) for actor in plan.actors}
    for actor, work in done:
        if work.entry == BEFORE:
            continue
        clock = after[id(actor)][work.entry]
        assert newest[id(actor)] <= clock
        newest[id(actor)] = clock
        if actor is not syncer:
            learner = actor.tape.header.learner
            learners[learner] = learners[learner].joined(clock)
        assert is_consistent_cut(newest[id(syncer)], learners)


def test_the_timeline_is_in_order_of_time_and_of_one_learner_where_asked(plan):
    lines = timeline(plan)
    assert all(a.wall <= b.wall for a, b in itertools.pairwise(lines))
    assert len(lines) == sum(len(actor.handled) + 1 + (not actor.tape.ended) for actor in plan.actors)
    own = chosen(lines, learner=2, around=None, steps=1)
    assert {line.learner for line in own} == {2, None}
    near = chosen(lines, learner=None, around=18, steps=0)
    assert 0 < len(near) < len(lines)
    merged = [line for line in near if "round 18 of fragment 0 is merged" in line.text]
    assert len(merged) == 1
    assert shown(merged[0], virtual=True).endswith(clock_text(merged[0].clock))


def test_a_learner_or_a_round_that_there_is_not_is_refused(plan):
    lines = timeline(plan)
    assert refusal(UsageError, chosen, lines, 9, None, 1).startswith(
        "learner: is 9, but must be one of 0, 1, "
    )
    assert refusal(UsageError, chosen, lines, None, 10_000, 1).startswith(
        "around: is 10000, but no round is "
    )


def test_a_clock_is_shown_as_learners_and_their_steps_then_fragments_and_their_versions():
    clock = VectorClock().stepped(1, 5, 12).stepped(0, 1, 3).merged(2, 7)
    assert clock_text(clock) == "[0:3 1:12 | 2:7]"
    assert (clock_text(VectorClock()), clock_text(None)) == ("[- | -]", "")
