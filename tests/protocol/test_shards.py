"""A learner's sessions with several shards of the syncer, and what a shard knows of them."""

import pytest

from ddiloco.protocol import actions, events
from ddiloco.protocol.learner import BEYOND_REJOINING, LearnerCore
from ddiloco.protocol.messages import NOTHING_MERGED, Watermark
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.schedule import fragments_of
from ddiloco.protocol.state import SyncerState, newest_incarnations
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.protocol.work import FragmentWork, LearnerWork


def welcome(shard, incarnation=1, data=NOTHING_MERGED):
    return events.Welcomed(incarnation, 0, (0,), (0,), (shard,), data=data, shard=shard)


def begun(total_steps=None, **policy):
    """A learner of two shards with a fragment each."""
    core = LearnerCore(0, 1, SyncPolicy(num_fragments=2, interval=4, **policy), total_steps, shards=2)
    for shard in (0, 1):
        core.handle(welcome(shard), 0.0)
    return core


def step(core):
    core.handle(events.StepStarted(10), 0.0)
    return core.handle(events.StepFinished(), 0.0)


def test_every_fragment_belongs_to_one_shard():
    owned = [p for shard in range(4) for p in fragments_of(shard, 4, 10)]
    assert sorted(owned) == list(range(10))
    assert fragments_of(0, 1, 3) == (0, 1, 2)


def test_a_shard_that_was_started_again_may_know_a_learner_by_its_number_at_another():
    """It reads the incarnations from all shards' disks; a newer process has a larger number than any."""
    core = begun()
    core.handle(events.NotMember(1, shard=1), 0.0)
    core.handle(events.NotMember(2, shard=1), 0.0)
    assert core.incarnations == (1, 3)
    (joined,) = core.handle(events.Rejected(1, "a newer incarnation is known", 3, shard=0), 0.0)
    assert (joined.shard, joined.event.incarnation) == (0, 4)
    (left,) = core.handle(events.Rejected(4, "a newer incarnation is known", 1001, shard=0), 0.0)
    assert isinstance(left, actions.EndProcess)


def test_a_process_that_only_begins_takes_a_larger_number_at_all_shards():
    """Else of two processes each might have the larger number at another shard, and wait for the other."""
    core = LearnerCore(0, 1, SyncPolicy(num_fragments=2), shards=2)
    core.handle(welcome(0), 0.0)
    out = core.handle(events.Rejected(1, "a newer incarnation is known", 9, shard=1), 0.0)
    assert core.incarnations == (1 + BEYOND_REJOINING,) * 2 and core.shards == ()
    assert [action.shard for action in out] == [0, 1]


def test_steps_under_way_as_a_shard_welcomes_afresh_are_no_work_for_it():
    core = begun()
    for _ in range(2):
        core.handle(events.StepStarted(10), 0.0)
    core.handle(events.NotMember(1, shard=1), 0.0)
    core.handle(welcome(1, incarnation=2), 0.0)
    for done in (1, 2):
        first, second = core.handle(events.StepFinished(), 0.0)
        assert [c.steps for c in first.event.report.counters] == [done]
        assert [c.steps for c in second.event.report.counters] == [0]
        assert (first.event.report.incarnation, second.event.report.incarnation) == (1, 2)
    assert [c.steps for c in step(core)[1].event.report.counters] == [1]


@pytest.mark.parametrize(("merged", "moves"), [(7, True), (6, False)])
def test_data_go_on_behind_what_another_shard_merged_unless_they_are_there_already(merged, moves):
    core = LearnerCore(0, 9, SyncPolicy(num_fragments=2, interval=4), shards=2)
    held = tuple(FragmentWork(0, 0, steps=4, tokens=40) for _ in range(2))
    core.resume(LearnerWork(clock=4, life=5, steps=4, fragments=held))
    step(core)
    step(core)  # by now as far as step 6 of the life before
    core.handle(events.NotMember(9, shard=1), 0.0)
    out = core.handle(welcome(1, incarnation=10, data=Watermark(5, merged, "there")), 0.0)
    assert (actions.DrawFrom("there") in out) == moves


def test_work_of_before_a_welcome_of_another_shard_is_claimed_from_where_its_data_began():
    """The second process has drawn batches 5 and 6 too, which that shard has merged of the first."""
    core = LearnerCore(0, 9, SyncPolicy(num_fragments=2, interval=4), shards=2)
    held = tuple(FragmentWork(0, 0, steps=4, tokens=40) for _ in range(2))
    core.resume(LearnerWork(clock=4, life=5, steps=4, fragments=held))
    step(core)
    step(core)
    core.handle(events.NotMember(9, shard=1), 0.0)
    core.handle(welcome(1, incarnation=10, data=Watermark(5, 6)), 0.0)
    for shard, began in ((0, 4), (1, 6)):
        out = core.handle(events.NotMember(core.incarnations[shard], shard=shard), 0.0)
        (joined,) = (action.event for action in out if isinstance(action.event, events.LearnerJoined))
        assert joined.began == Watermark(5, began)


def test_a_learner_that_no_shard_knows_is_bound_by_all():
    core = begun(quorum=None, max_run_ahead=0)
    for _ in range(2):
        step(core)
    assert core.blocked  # by fragment 1, due at step 2
    core.handle(events.Disconnected(1), 0.0)
    assert not core.blocked and core.shards == (0,)
    core.handle(events.Disconnected(0), 0.0)
    assert core.blocked and core.shards == ()


def test_a_shard_has_the_state_of_its_fragments_alone():
    policy = SyncPolicy(num_learners=1, num_fragments=3, interval=3)
    state = SyncerState((0, 4, 0), (0, 10, 0), ((0, 7),))
    core = SyncerCore(policy, None, state, shard=1, shards=2)
    (told,) = (a for a in core.handle(events.LearnerJoined(0, 8), 0.0) if isinstance(a, actions.Send))
    assert (told.event.fragments, told.event.versions, told.event.step) == ((1,), (4,), 10)
    assert told.event.shard == 1


def test_a_start_takes_the_largest_incarnations_of_all_disks():
    assert newest_incarnations(((0, 3), (1, 7)), (), ((0, 5), (2, 1))) == ((0, 5), (1, 7), (2, 1))


def test_data_never_go_back_whichever_lives_shards_name_one_after_another():
    """Of three processes of one number the data are behind the second's as another shard names the first."""
    core = LearnerCore(0, 2001, SyncPolicy(num_fragments=2, interval=4), shards=2)
    held = tuple(FragmentWork(0, 0, steps=9, tokens=90) for _ in range(2))
    core.resume(LearnerWork(clock=9, life=1, steps=9, fragments=held))
    core.handle(events.NotMember(2001, shard=0), 0.0)
    out = core.handle(welcome(0, incarnation=2002, data=Watermark(1001, 30, "of 30")), 0.0)
    assert actions.DrawFrom("of 30") in out
    for _ in range(8):
        step(core)
    core.handle(events.NotMember(2001, shard=1), 0.0)
    of_first = core.handle(welcome(1, incarnation=2002, data=Watermark(1, 21, "of 21")), 0.0)
    core.handle(events.NotMember(2002, shard=1), 0.0)
    of_second = core.handle(welcome(1, incarnation=2003, data=Watermark(1001, 32, "of 32")), 0.0)
    assert not [action for action in of_first + of_second if isinstance(action, actions.DrawFrom)]
