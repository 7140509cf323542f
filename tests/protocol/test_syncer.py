"""The syncer's core at the edges of its policy, under doubled messages, and in runs that do not end."""

import itertools

import pytest

from ddiloco.protocol import actions, events
from ddiloco.protocol.errors import LocalProtocolError
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report, RoundId
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.syncer import SyncerCore
from tests.protocol.desk import Desk, asked, merges, only


def records(out, name):
    return [action.values for action in out if isinstance(action, actions.Record) and action.name == name]


@pytest.mark.parametrize("early", ["never opened", "gathering", "grace"])
def test_the_end_of_a_merge_that_was_not_asked_for_is_the_drivers_mistake(early):
    desk = Desk(learners=2, num_fragments=1, interval=2, quorum=1, gamma=0.9)
    if early != "never opened":
        desk.report(0, 1, at=1.0)
        desk.report(0, 2, at=2.0)
    if early == "grace":
        assert not merges(desk.offer(0, (2, 0)))
    with pytest.raises(LocalProtocolError, match="was not being merged"):
        desk.merged(2, 0)


def test_a_merge_that_ends_twice_is_the_drivers_mistake():
    desk = Desk(learners=1, num_fragments=1, interval=2, gamma=0.0)
    desk.report(0, 2)
    desk.settle()
    with pytest.raises(LocalProtocolError):
        desk.merged(2, 0)
    assert desk.core.versions == (1,)


def test_without_an_overlap_one_merge_at_a_time_is_made():
    desk = Desk(learners=1, num_fragments=4, interval=4, overlap=0, gamma=0.0)
    desk.report(0, 1)
    assert merges(desk.offer(0, (1, 1))) == [(1, 1, [0])]
    desk.report(0, 2, steps=2)
    assert not merges(desk.offer(0, (2, 2)))
    assert merges(desk.merged(1, 1)) == [(2, 2, [0])]


@pytest.mark.parametrize("overlap", [1, 2, 3])
def test_at_most_as_many_rounds_merge_at_once_as_may_overlap(overlap):
    desk = Desk(learners=1, num_fragments=6, interval=6, overlap=overlap, gamma=0.0)
    begun = []
    for step in range(1, 6):
        desk.report(0, step, steps=step)
        if (0, RoundId(step, step)) in desk.owed:
            begun += merges(desk.offer(0, (step, step)))
    assert len(begun) == overlap


def test_rounds_in_flight_are_of_different_fragments_however_large_the_overlap():
    desk = Desk(learners=1, num_fragments=2, interval=1, overlap=5, gamma=0.0)
    desk.report(0, 1)
    desk.report(0, 2, steps=2)
    assert {which for _, which in desk.owed} == {RoundId(1, 0), RoundId(1, 1)}


def test_fragments_due_at_one_step_all_get_their_round():
    desk = Desk(learners=1, num_fragments=5, interval=2, overlap=1, gamma=0.0)
    rounds = []
    for step in (1, 2):
        desk.report(0, step, steps=step)
        rounds += merges(desk.settle())
    assert rounds == [(1, 3, [0]), (1, 4, [0]), (2, 0, [0]), (2, 1, [0]), (2, 2, [0])]


def test_a_run_shorter_than_the_interval_merges_nothing_and_finishes():
    desk = Desk(total_steps=3, learners=2, num_fragments=1, interval=4)
    assert not desk.report(0, 3)
    assert desk.report(1, 3) == [actions.Finish()]
    assert desk.core.versions == (0,)


def test_a_run_of_no_steps_finishes_as_soon_as_somebody_is_there():
    desk = Desk(total_steps=0)
    desk.enter(0)
    assert desk.core.finished


def test_a_run_finishes_once():
    desk = Desk(total_steps=1, learners=1, num_fragments=1, interval=4)
    assert actions.Finish() in desk.report(0, 1)
    assert desk.report(0, 1) == []
    desk.enter(1)
    assert desk.report(1, 1) == []


def test_nobody_left_does_not_finish_a_run_and_the_first_to_return_does():
    desk = Desk(total_steps=2, learners=1, num_fragments=1, interval=2, gamma=0.0)
    desk.report(0, 2)
    desk.offer(0, (2, 0))
    desk.tell(events.LearnerLost(0, 1, "its host died"))
    assert actions.Finish() not in desk.merged(2, 0)
    desk.enter(0, incarnation=2)
    assert desk.core.finished


def test_an_endless_run_keeps_a_bounded_state():
    """Learners come, die and lose updates for a long time; what is kept does not grow with it."""
    desk = Desk(num_learners=4, num_fragments=3, interval=3, quorum=1, gamma=0.0, offer_timeout=1.0)
    sizes = []
    step = 0
    for incarnation in range(1, 41):
        for learner in range(4):
            desk.tell(events.LearnerLost(learner, incarnation - 1, "its host died"))
            desk.enter(learner, incarnation)
        for _ in range(30):
            step += 1
            for learner in range(4):
                desk.report(learner, step, at=desk.now + 0.3, incarnation=incarnation)
                if step % 5:
                    desk.settle()
        members = desk.core._members._members
        sizes.append(
            len(members)
            + sum(len(member.sent) + len(member.asked) for member in members.values())
            + sum(len(r.failed) + len(r.arrived) + len(r.owed) for r in desk.core._rounds._open.values())
        )
    assert min(desk.core.versions) > 100
    assert max(sizes) <= 4 + 2 * 4 * 3 + 3 * 4 * 3


def test_a_learner_that_asks_on_is_welcomed_anew_once_its_welcome_may_be_lost_until_it_is_ready():
    """A large welcome takes long; to send it with every question would make it take longer."""
    desk = Desk(num_fragments=1, resend_timeout=5.0)
    for at, answered in ((0.0, True), (1.0, False), (4.9, False), (5.0, True), (6.0, False)):
        out = desk.tell(events.LearnerJoined(0, 1), at=at)
        assert bool(out) == answered
    assert records(desk.tell(events.LearnerReady(0, 1, 0, (0,))), "learner_ready")
    assert (
        only(actions.Drop, desk.tell(events.LearnerReady(0, 1, 0, (0,)))).reason == "ready without a welcome"
    )
    assert desk.core.live == (0,)


def test_a_recovering_learner_neither_seeds_nor_forms_a_quorum():
    desk = Desk(learners=1, num_learners=2, num_fragments=1, interval=2, quorum=2, gamma=0.0)
    assert not asked(desk.tell(events.LearnerJoined(1, 1)))
    desk.report(0, 2)
    assert not merges(desk.settle())
    assert desk.core.live == (0,)
    assert desk.tell(events.Timeout()) == []


def test_what_an_incarnation_that_has_not_reported_offers_is_not_taken():
    """Nothing says that it has done the work."""
    desk = Desk(learners=2, num_fragments=1, interval=2, quorum=1, gamma=0.0)
    desk.report(1, 1)
    desk.tell(events.LearnerLost(1, 1, "its host died"))
    desk.tell(events.LearnerJoined(1, 2))
    desk.tell(events.LearnerReady(1, 2, 1, (0,)))
    assert only(actions.Drop, desk.offer(1, (2, 0), incarnation=2)).reason == "more work than it reported"


def test_the_quorum_of_all_is_of_those_that_are_live():
    desk = Desk(learners=3, num_learners=3, num_fragments=1, interval=2, quorum=None)
    desk.report(0, 2)
    desk.report(1, 2)
    assert not merges(desk.settle())
    assert merges(desk.tell(events.LearnerLost(2, 1, "its host died"))) == [(2, 0, [0, 1])]


def test_the_clock_is_the_newest_merged_step_even_if_rounds_end_out_of_order():
    desk = Desk(learners=1, num_fragments=4, interval=4, overlap=2, gamma=0.0)
    for step in (1, 2):
        desk.report(0, step, steps=step)
        desk.offer(0, (step, step))
    desk.merged(2, 2)
    assert desk.core.step == 2
    desk.merged(1, 1)
    assert desk.core.step == 2
    assert desk.core.merged_steps == (0, 1, 2, 0)


def test_a_welcome_names_the_versions_and_their_steps():
    desk = Desk(learners=1, num_fragments=2, interval=2, gamma=0.0)
    desk.report(0, 1)
    desk.settle()
    welcome = events.Welcomed(1, 1, (0, 1), (0, 1))
    assert desk.tell(events.LearnerJoined(5, 1)) == [actions.Tell(((5, 1),), welcome)]


@pytest.mark.parametrize("offsets", list(itertools.permutations([0.0, 0.25, 0.5])))
def test_every_deadline_is_in_the_future_and_its_timeout_moves_it_on(offsets):
    """A deadline that stayed in the past would have a driver spin."""
    desk = Desk(learners=3, num_fragments=2, interval=2, quorum=2, offer_timeout=3.0, silence_timeout=7.0)
    for step in (1, 2, 3):
        for learner, offset in sorted(enumerate(offsets), key=lambda pair: pair[1]):
            desk.report(learner, step, at=step + offset)
    seen = []
    while (deadline := desk.core.next_deadline()) is not None:
        assert deadline > desk.now
        seen.append(deadline)
        desk.tell(events.Timeout(), at=deadline)
    assert seen == sorted(set(seen))
    assert desk.core.live == ()


def test_a_silent_learner_is_not_taken_for_slow():
    """The pause of a learner that was silent is no step time: the grace window does not grow by it."""
    desk = Desk(learners=2, num_fragments=1, interval=8, overlap=1, gamma=0.5, silence_timeout=5.0)
    for step in range(1, 5):
        desk.report(0, step, at=float(step))
    desk.report(1, 1, at=4.0)
    desk.tell(events.Timeout(), at=9.0)
    assert desk.core.live == ()
    for step in range(5, 9):
        desk.report(1, step - 3, at=96.0 + step)
        desk.report(0, step, at=96.0 + step)
    desk.offer(0, (8, 0))
    assert desk.core.next_deadline() - desk.now == pytest.approx(0.5)


def test_a_done_learner_is_not_silent():
    desk = Desk(total_steps=4, learners=2, num_fragments=1, interval=4, silence_timeout=5.0)
    desk.report(0, 4, at=1.0)
    assert records(desk.tell(events.Timeout(), at=100.0), "learner_silent") == [{"learner": 1}]
    assert desk.core.live == (0,)


def test_a_learner_whose_offer_was_no_use_is_not_asked_again_before_it_reports():
    """Otherwise a learner that answers at once with the same fragment would keep the syncer busy for ever."""
    desk = Desk(learners=1, num_fragments=1, interval=2, gamma=0.0)
    desk.report(0, 2)
    assert not asked(desk.fail(0, (2, 0)))
    assert not asked(desk.tell(events.Timeout(), at=1.0))
    assert not asked(desk.report(0, 1))  # an old report that comes late
    assert asked(desk.report(0, 3)) == [(0, 2, 0)]


def test_what_a_learner_offered_before_it_died_is_merged():
    """Its work is whole and checked; only of what is still to come is a dead learner not waited for."""
    desk = Desk(learners=3, num_fragments=1, interval=2, overlap=2, quorum=2, gamma=0.5)
    for step in (1, 2):
        for learner in (0, 1):
            desk.report(learner, step, at=float(step))
    desk.offer(0, (2, 0))
    desk.offer(1, (2, 0))
    desk.tell(events.LearnerLost(1, 1, "its host died"))
    assert merges(desk.tell(events.LearnerLost(2, 1, "its host died"))) == [(2, 0, [0, 1])]


@pytest.mark.parametrize("quorum", [1, None])
def test_a_last_round_whose_only_offer_fails_is_abandoned(quorum):
    one = {"learners": 1, "num_learners": 1, "num_fragments": 1, "interval": 2}
    desk = Desk(total_steps=2, quorum=quorum, gamma=0.0, **one)
    desk.report(0, 2)
    out = desk.fail(0, (2, 0))
    assert records(out, "round_abandoned") == [{"step": 2, "fragment": 0}]
    assert out[-1] == actions.Finish()


def test_a_learner_that_has_not_stepped_since_its_update_is_not_waited_for():
    desk = Desk(learners=2, num_learners=2, num_fragments=1, interval=2, quorum=None)
    desk.report(0, 2, steps=0)
    desk.report(1, 2, steps=1)
    assert merges(desk.offer(1, (2, 0))) == [(2, 0, [1])]


def test_a_repeated_report_is_no_step():
    """Heartbeats of one step do not make steps look short, and the grace window with them."""
    desk = Desk(learners=2, num_fragments=1, interval=2, overlap=1, quorum=1, gamma=0.5)
    desk.report(0, 1, at=1.0)
    for beat in range(1, 10):
        desk.report(0, 1, at=1.0 + beat / 10)
    desk.report(0, 2, at=3.0)
    desk.offer(0, (2, 0))
    assert desk.core.next_deadline() - desk.now == pytest.approx(0.5 * 2.0)


def test_a_last_round_waits_for_those_that_came_late_before_it_is_abandoned():
    desk = Desk(total_steps=2, learners=2, num_fragments=1, interval=2, quorum=1, gamma=0.0)
    desk.report(0, 2)
    desk.report(1, 2)
    assert not records(desk.fail(0, (2, 0)), "round_abandoned")
    assert merges(desk.offer(1, (2, 0))) == [(2, 0, [1])]


def test_a_last_round_is_not_abandoned_while_a_fragment_is_on_its_way():
    desk = Desk(total_steps=2, learners=2, num_fragments=1, interval=2, quorum=2, gamma=0.0)
    desk.report(0, 2)
    desk.report(1, 2)
    desk.offer(0, (2, 0))
    out = desk.fail(1, (2, 0))
    assert records(out, "round_abandoned") and out[-1] == actions.Finish()
    desk = Desk(total_steps=2, learners=3, num_fragments=1, interval=2, quorum=2, gamma=0.0)
    for learner in range(3):
        desk.report(learner, 2)
    desk.offer(0, (2, 0))
    assert not records(desk.fail(1, (2, 0)), "round_abandoned")
    assert merges(desk.offer(2, (2, 0))) == [(2, 0, [0, 2])]


@pytest.mark.parametrize(("quorum", "skipped"), [(1, True), (2, False)])
def test_a_round_is_too_late_once_its_whole_quorum_has_come_to_the_next_turn(quorum, skipped):
    """What a lone fast learner has passed may still be in time for the others, where they are needed."""
    desk = Desk(learners=2, num_fragments=2, interval=2, overlap=1, quorum=quorum, gamma=0.0)
    desk.report(0, 1, at=1.0)
    desk.report(0, 5, at=5.0, steps=5)
    out = desk.settle()
    assert bool(records(out, "round_skipped")) == skipped


@pytest.mark.parametrize(
    ("merged_steps", "first"),
    [
        ((0, 0, 0), (1, 1)),
        ((6, 4, 2), (5, 2)),
        ((3, 1, 2), (4, 1)),
        ((0, 7, 8), (3, 0)),
        ((9, 7, 8), (10, 1)),
    ],
)
def test_a_restored_syncer_goes_on_with_the_earliest_round_that_was_not_merged(merged_steps, first):
    """Fragments 0, 1, 2 are due at the steps 3, 6 ...; 1, 4 ...; 2, 5 ...; whoever lacks a turn is next."""
    state = SyncerState((1, 1, 1), merged_steps)
    core = SyncerCore(SyncPolicy(num_learners=1, num_fragments=3, interval=3, gamma=0.0), None, state)
    joined = core.handle(events.LearnerJoined(0, 1, first[0], (1, 1, 1)), 0.0)
    counters = (FragmentCounters(1, 1, 10),) * 3
    out = core.handle(events.StepReported(Report(0, 1, first[0], counters)), 0.0)
    assert asked(joined + out)[:1] == [(0, *first)]
    assert core.step == max(merged_steps)


def test_the_state_is_what_was_merged_and_who_has_been_there():
    desk = Desk(learners=2, num_fragments=2, interval=2, gamma=0.0)
    before = desk.core.state()
    assert before == SyncerState((0, 0), (0, 0), ((0, 1), (1, 1)))
    desk.report(0, 1)
    desk.settle()
    for learner in (0, 1):
        desk.tell(events.LearnerLost(learner, 1, "its host died"))
    desk.enter(0, incarnation=4)
    expected = before.after(RoundId(1, 1))
    assert desk.core.state() == SyncerState(expected.versions, expected.merged_steps, ((0, 4), (1, 1)))


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (SyncerState((0,), (0, 0)), "1 versions, 2 merged steps and 1 lineages, but must have 2"),
        (SyncerState((0, 0, 0), (0, 0, 0)), "3 versions, 3 merged steps and 3 lineages, but must have 2"),
        (SyncerState((0, -1), (0, 0)), "below 0"),
    ],
)
def test_a_state_of_another_run_is_the_drivers_mistake(state, told):
    with pytest.raises(LocalProtocolError, match=told):
        SyncerCore(SyncPolicy(num_fragments=2), 10, state)


@pytest.mark.parametrize("learner", [0, 3])
def test_nobody_of_before_a_crash_is_a_member_after_it_and_none_that_departed_comes_back(learner):
    desk = Desk(learners=4, num_fragments=1)
    desk.tell(events.LearnerLost(3, 1, "its host died"))
    desk.core = SyncerCore(desk.policy, None, desk.core.state())
    assert desk.core.live == ()
    no_member = actions.Tell(((learner, 1),), events.NotMember(1))
    assert no_member in desk.report(learner, 1)
    assert desk.tell(events.LearnerJoined(learner, 1)) == [no_member]
    desk.tell(events.LearnerJoined(learner, 2, 1, (0,)))
    assert desk.core.live == (learner,)


def test_a_run_that_had_ended_before_a_crash_ends_again_with_the_first_to_return():
    desk = Desk(total_steps=2, learners=1, num_fragments=1, interval=2, gamma=0.0)
    desk.report(0, 2)
    assert actions.Finish() in desk.settle()
    desk.core = SyncerCore(desk.policy, 2, desk.core.state())
    assert actions.Finish() in desk.tell(events.LearnerJoined(0, 2, 2, (0,)))


def test_a_return_is_asked_at_once_but_its_offer_is_taken_only_once_it_has_reported():
    """What it has to give is known from its counters, which a return does not carry."""
    desk = Desk(learners=1, num_learners=2, num_fragments=1, interval=2, quorum=2, gamma=0.0)
    desk.report(0, 2)
    desk.settle()
    assert asked(desk.tell(events.LearnerJoined(1, 7, 2, (0,)))) == [(1, 2, 0)]
    desk.report(1, 2, incarnation=7)
    assert merges(desk.offer(1, (2, 0), incarnation=7)) == [(2, 0, [0, 1])]


def test_an_update_that_a_return_needs_is_sent_again_until_it_is_applied():
    desk = Desk(learners=1, num_fragments=1, interval=2, gamma=0.0, resend_timeout=5.0)
    desk.report(0, 2)
    desk.settle()
    update = events.UpdateArrived(0, 1, 2)
    assert only(events.UpdateArrived, desk.tell(events.LearnerJoined(1, 3, 2, (0,)))) == update
    behind = events.StepReported(Report(1, 3, 3, (FragmentCounters(0, 3, 30),)))
    assert actions.Tell(((1, 3),), update) in desk.tell(behind, at=5.0)


def test_nobody_takes_the_place_of_a_learner_that_speaks_whatever_number_it_bears():
    desk = Desk(learners=1, num_fragments=1, interval=2)
    desk.report(0, 1, at=1.0)
    for incarnation in (1, 2, 2**61):
        out = desk.tell(events.LearnerJoined(0, incarnation), at=2.0)
        assert out == [actions.Drop(0, "the number of a learner that still speaks")]
    assert desk.core.live == (0,)
    too_large = desk.tell(events.LearnerJoined(0, 2**62), at=60.0)
    assert too_large == [actions.Drop(0, "an incarnation beyond belief")]
    assert only(events.Welcomed, desk.tell(events.LearnerJoined(0, 2), at=60.0))


def test_a_departed_incarnation_that_comes_back_with_what_it_holds_hears_that_it_is_no_member():
    desk = Desk(num_fragments=1)
    desk.enter(0)
    desk.tell(events.LearnerLost(0, 1, "connection broken"))
    no_member = actions.Tell(((0, 1),), events.NotMember(1))
    assert desk.tell(events.LearnerJoined(0, 1, 0, (0,))) == [no_member]


def test_whoever_comes_too_late_for_its_number_hears_the_newest():
    desk = Desk(num_fragments=1)
    desk.enter(0, incarnation=2**61)
    rejected = events.Rejected(2, "a newer incarnation is known", 2**61)
    assert desk.tell(events.LearnerJoined(0, 2)) == [actions.Tell(((0, 2),), rejected)]


@pytest.mark.parametrize(
    ("versions", "lineages", "welcomed"),
    [
        ((5, 3), (7, 0), False),
        ((5, 3), (8, 0), True),  # made by a syncer whose disk was lost: the number alone is the same
        ((4, 3), (8, 0), False),  # what it lacks is sent anyway
        ((6, 3), (8, 0), True),  # newer than anything that is known
    ],
)
def test_a_learner_of_a_lost_history_gets_all_fragments_anew(versions, lineages, welcomed):
    """A syncer that starts from an older disk makes versions whose numbers others bore before."""
    state = SyncerState((5, 3), (10, 6), lineages=(7, 0))
    core = SyncerCore(SyncPolicy(num_learners=1, num_fragments=2, interval=2), None, state, lineage=9)
    out = core.handle(events.LearnerJoined(0, 2, 11, versions, lineages), 0.0)
    assert any(isinstance(getattr(a, "event", None), events.Welcomed) for a in out) == welcomed
    assert core.live == (() if welcomed else (0,))


def test_a_version_bears_the_lineage_of_the_start_that_made_it():
    state = SyncerState((5, 3), (10, 6), lineages=(7, 0))
    core = SyncerCore(SyncPolicy(num_learners=1, num_fragments=2, interval=2, gamma=0.0), None, state, 9)
    core.handle(events.LearnerJoined(0, 2, 11, (5, 3), (7, 0)), 0.0)
    report = Report(0, 2, 11, (FragmentCounters(5, 1, 10), FragmentCounters(3, 1, 10)))
    core.handle(events.StepReported(report), 0.0)
    offer = Contribution(0, 2, fragment=1, version=3, step=11, steps=1, tokens=10)
    core.handle(events.FragmentArrived(RoundId(11, 1), offer), 0.0)
    update = only(events.UpdateArrived, core.handle(events.MergeFinished(RoundId(11, 1)), 0.0))
    assert update.lineage == 9
    assert core.state().lineages == (7, 9)


@pytest.mark.parametrize("total_steps", [None, 10**9])
def test_a_step_beyond_belief_does_not_move_the_schedule(total_steps):
    desk = Desk(total_steps=total_steps, learners=2, num_fragments=2, interval=2, gamma=0.0)
    out = desk.report(0, 10**9)
    no_member = actions.Tell(((0, 1),), events.NotMember(1))
    assert out == [actions.Drop(0, "impossible report"), no_member]
    desk.report(1, 1)
    assert merges(desk.settle()) == [(1, 1, [1])]


def test_a_fragment_that_comes_after_the_timeout_is_taken_while_its_round_waits():
    """Otherwise a round over links slower than the timeout would never be complete."""
    desk = Desk(learners=2, num_fragments=1, interval=2, quorum=2, gamma=0.0, offer_timeout=3.0)
    desk.report(0, 2)
    desk.report(1, 2)
    desk.offer(0, (2, 0))
    assert only(actions.Drop, desk.tell(events.Timeout(), at=3.0)).reason == "offer timed out"
    assert merges(desk.offer(1, (2, 0), at=3.5)) == [(2, 0, [0, 1])]


def test_work_on_the_version_before_is_not_merged():
    desk = Desk(learners=1, num_fragments=1, interval=2, gamma=0.0)
    desk.report(0, 2)
    desk.settle()
    desk.report(0, 4)
    old = Contribution(0, 1, 0, version=0, step=4, steps=2, tokens=20)
    dropped = only(actions.Drop, desk.tell(events.FragmentArrived(RoundId(4, 0), old)))
    assert dropped.reason == "stale fragment"
    assert desk.core.versions == (1,)


@pytest.mark.parametrize(
    ("claimed", "taken"),
    [
        ({"steps": 3, "tokens": 20}, False),
        ({"steps": 2, "tokens": 21}, False),
        ({"steps": 2, "tokens": 20}, True),
    ],
)
def test_an_offer_that_claims_more_than_was_reported_is_dropped(claimed, taken):
    """One step and 10^15 tokens would take the whole weight of a merge."""
    desk = Desk(learners=1, num_fragments=1, interval=2, gamma=0.0)
    desk.report(0, 2, steps=2)
    contribution = Contribution(0, 1, 0, version=0, step=2, **claimed)
    out = desk.tell(events.FragmentArrived(RoundId(2, 0), contribution))
    assert bool(merges(out)) == taken
    assert [a.reason for a in out if isinstance(a, actions.Drop)] == (
        [] if taken else ["more work than it reported"]
    )


def test_an_offer_of_a_step_whose_report_is_behind_it_may_hold_that_step():
    """Messages are not ordered: the report of the last step may come after the offer that it made."""
    desk = Desk(learners=1, num_fragments=1, interval=2, gamma=0.0)
    desk.report(0, 1, steps=1)
    early = Contribution(0, 1, 0, version=0, step=2, steps=2, tokens=25)  # a longer batch
    assert not merges(desk.tell(events.FragmentArrived(RoundId(2, 0), early)))
    assert merges(desk.report(0, 2, steps=2)) == [(2, 0, [0])]


@pytest.mark.parametrize("end", ["lost", "replaced", "merging"])
def test_a_late_fragment_is_not_taken_of_one_that_has_gone_or_once_the_merge_began(end):
    desk = Desk(learners=2, num_learners=2, num_fragments=1, interval=2, quorum=None, offer_timeout=3.0)
    desk.report(0, 2)
    desk.report(1, 2)
    if end == "lost":
        desk.tell(events.LearnerLost(1, 1, "its host died"))
    elif end == "replaced":
        desk.report(0, 2, at=30.0)
        desk.tell(events.LearnerJoined(1, 2), at=30.0)
    else:
        desk.offer(0, (2, 0))
        desk.tell(events.Timeout(), at=3.0)
    dropped = only(actions.Drop, desk.offer(1, (2, 0)))
    assert dropped.reason == "unexpected fragment"


def test_the_offer_of_a_silent_learner_is_not_taken_before_it_speaks():
    desk = Desk(learners=1, num_fragments=1, interval=2, gamma=0.0, silence_timeout=5.0)
    desk.report(0, 2, at=1.0)
    desk.tell(events.Timeout(), at=6.0)
    assert only(actions.Drop, desk.offer(0, (2, 0))).reason == "unexpected fragment"
    desk.report(0, 2, at=7.0)
    assert merges(desk.offer(0, (2, 0))) == [(2, 0, [0])]


def test_an_offer_that_was_left_out_of_its_merge_is_told_to_nobody_as_merged():
    desk = Desk(num_learners=3, num_fragments=1, interval=2, quorum=3, learners=3)
    for learner in range(3):
        desk.report(learner, 2, steps=2)
    for learner in range(3):
        desk.offer(learner, (2, 0))
    out = desk.tell(events.MergeFinished(RoundId(2, 0), left_out=(1,)))
    update = only(events.UpdateArrived, out)
    assert [given.learner for given in update.merged] == [0, 2]
    (record,) = [a.values for a in out if isinstance(a, actions.Record) and a.name == "round"]
    assert (record["learners"], record["left_out"], record["quorum"]) == ([0, 2], [1], 2)
    assert record["tokens"] == sum(c[-1] for c in record["contributions"]) == 40


def refuse(desk, due, *learners):
    """The merge of a round ends, without the offers of these learners."""
    desk.merging.remove(RoundId(*due))
    return desk.tell(events.MergeFinished(RoundId(*due), left_out=learners))


def offered_by(givers, **policy):
    """A desk whose first round is being merged, of the offers of these learners."""
    desk = Desk(num_fragments=1, interval=2, gamma=0.0, **policy)
    for learner in range(desk.policy.num_learners):
        desk.report(learner, 2, steps=2)
    for learner in givers:
        desk.offer(learner, (2, 0))
    return desk


ALONE = {"num_learners": 2, "learners": 2, "quorum": 1}


def test_a_merge_of_which_nothing_came_makes_no_version():
    desk = offered_by([0], **ALONE)
    out = refuse(desk, (2, 0), 0)
    assert out == [actions.Record("round_refused", {"step": 2, "fragment": 0, "left_out": [0]})]
    assert (desk.core.versions, desk.core.merged_steps) == ((0,), (0,))
    assert desk.core.state() == SyncerState((0,), (0,), ((0, 1), (1, 1)))


def test_whose_offer_was_refused_gives_again_but_no_longer_alone():
    desk = offered_by([0], **ALONE)
    refuse(desk, (2, 0), 0)
    assert asked(desk.report(0, 2, steps=2)) == [(0, 2, 0)]
    assert not merges(desk.offer(0, (2, 0)))
    assert merges(desk.offer(1, (2, 0))) == [(2, 0, [0, 1])]
    update = only(events.UpdateArrived, refuse(desk, (2, 0), 0))
    assert [given.learner for given in update.merged] == [1]


@pytest.mark.parametrize("end", ["lost", "refused too", "not sound"])
def test_whose_offer_was_refused_gives_alone_again_where_nobody_else_can(end):
    desk = offered_by([0], **ALONE)
    refuse(desk, (2, 0), 0)
    desk.report(0, 2, steps=2)
    match end:
        case "lost":
            assert not merges(desk.offer(0, (2, 0)))
            out = desk.tell(events.LearnerLost(1, 1, "its host died"))
        case "refused too":
            desk.offer(1, (2, 0))
            refuse(desk, (2, 0), 1)
            out = desk.offer(0, (2, 0))
        case "not sound":
            desk.fail(1, (2, 0))
            out = desk.offer(0, (2, 0))
    assert merges(out) == [(2, 0, [0])]


def test_an_offer_that_came_too_late_for_a_merge_of_nothing_is_asked_for_at_once():
    desk = offered_by([0], **ALONE)
    assert only(actions.Drop, desk.offer(1, (2, 0))).reason == "unexpected fragment"
    assert asked(refuse(desk, (2, 0), 0)) == [(1, 2, 0)]
    assert merges(desk.offer(1, (2, 0))) == [(2, 0, [1])]


def test_where_learners_wait_nobody_is_waited_for_after_a_merge_of_nothing():
    desk = offered_by([0, 1], **{**ALONE, "quorum": None}, max_run_ahead=0)
    refuse(desk, (2, 0), 0, 1)
    assert sorted(asked(desk.report(0, 2, steps=2)) + asked(desk.report(1, 2, steps=2))) == [
        (0, 2, 0),
        (1, 2, 0),
    ]
    assert not merges(desk.offer(0, (2, 0)))
    assert merges(desk.offer(1, (2, 0))) == [(2, 0, [0, 1])]


def test_a_last_round_of_which_nothing_came_is_abandoned():
    desk = offered_by([0], **ALONE, total_steps=2)
    desk.report(1, 2, steps=0)
    out = refuse(desk, (2, 0), 0)
    assert records(out, "round_abandoned") and out[-1] == actions.Finish()
