"""Rounds: how many at once, what is taken into a merge, and how the last ones end."""

import pytest

from ddiloco.protocol import actions, events
from ddiloco.protocol.errors import LocalProtocolError
from ddiloco.protocol.messages import (
    NOTHING_MERGED,
    Contribution,
    FragmentCounters,
    Report,
    RoundId,
    Watermark,
)
from ddiloco.protocol.policy import MAX_AGE, TIMEOUT_SLACK, SyncPolicy
from ddiloco.protocol.prospects import MAX_TRIES
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.updates import Updates
from tests.protocol.desk import Desk, asked, merges, only, records


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


def test_what_a_learner_offered_before_it_died_is_merged():
    """Its work is whole and checked; only of what is still to come is a dead learner not waited for."""
    desk = Desk(learners=3, num_fragments=1, interval=2, overlap=2, quorum=2, gamma=0.5)
    for step in (1, 2):
        for learner in (0, 1):
            desk.report(learner, step, at=float(step))
    desk.offer(0, (2, 0))
    desk.offer(1, (2, 0))
    desk.handle(events.LearnerLost(1, 1, "its host died"))
    assert merges(desk.handle(events.LearnerLost(2, 1, "its host died"))) == [], "it may rejoin in time"
    assert merges(desk.handle(events.Timeout(), at=desk.core.next_deadline())) == [(2, 0, [0, 1])]


@pytest.mark.parametrize("quorum", [1, None])
def test_a_last_round_whose_only_offer_fails_each_time_it_is_asked_for_is_abandoned(quorum):
    one = {"learners": 1, "num_learners": 1, "num_fragments": 1, "interval": 2}
    desk = Desk(total_steps=2, quorum=quorum, gamma=0.0, **one)
    for _ in range(MAX_TRIES):
        desk.report(0, 2)
        assert (0, RoundId(2, 0)) in desk.owed and not desk.core.finished
        desk.owed.clear()
        out = desk.fail(0, (2, 0))
    assert records(out, "round_abandoned") == [{"step": 2, "fragment": 0}]
    assert out[-1] == actions.Finish()


def test_a_learner_that_has_not_stepped_since_its_update_is_not_waited_for():
    desk = Desk(learners=2, num_learners=2, num_fragments=1, interval=2, quorum=None)
    desk.report(0, 2, steps=0)
    desk.report(1, 2, steps=1)
    assert merges(desk.offer(1, (2, 0))) == [(2, 0, [1])]


def test_a_last_round_is_not_abandoned_while_a_fragment_is_on_its_way():
    desk = Desk(total_steps=2, learners=2, num_fragments=1, interval=2, quorum=2, gamma=0.0)
    desk.report(0, 2)
    desk.report(1, 2)
    desk.offer(0, (2, 0))
    assert not records(desk.fail(1, (2, 0)), "round_abandoned")
    assert asked(desk.report(1, 2)) == [(1, 2, 0)]  # it is repeated
    assert merges(desk.offer(1, (2, 0))) == [(2, 0, [0, 1])]
    desk = Desk(total_steps=2, learners=3, num_fragments=1, interval=2, quorum=2, gamma=0.0)
    for learner in range(3):
        desk.report(learner, 2)
    desk.offer(0, (2, 0))
    assert not records(desk.fail(1, (2, 0)), "round_abandoned")
    assert merges(desk.offer(2, (2, 0))) == [(2, 0, [0, 2])]


@pytest.mark.parametrize(("quorum", "skipped"), [(1, True), (2, False)])
def test_a_round_is_too_late_once_its_whole_quorum_has_come_to_the_next_turn(quorum, skipped):
    """What a lone fast learner has passed may still be in time for the others, where they are needed."""
    policy = {"num_fragments": 2, "interval": 2, "overlap": 1, "quorum": quorum, "gamma": 0.0}
    desk = Desk(learners=2, num_learners=2, **policy)
    desk.report(0, 1, at=1.0)
    desk.report(0, 5, at=5.0, steps=5)
    out = desk.settle()
    assert bool(records(out, "round_skipped")) == skipped


def test_an_offer_is_waited_for_longer_if_the_welcome_was_slow_to_come():
    """As long as its share of the welcome's bytes took, four times: learner 1 is behind a thin link."""
    desk = Desk(
        num_learners=2, learners=1, num_fragments=2, interval=2, quorum=2, gamma=0.0, offer_timeout=3.0
    )
    desk.handle(events.LearnerJoined(1, 1))
    desk.handle(events.LearnerJoined(1, 1), at=5.0)  # asks again, which begins nothing again
    desk.handle(events.LearnerReady(1, 1, 0, (0, 0)), at=10.0)
    desk.report(0, 1)
    desk.report(1, 1)
    assert desk.core.next_deadline() == 10.0 + 3.0
    assert only(actions.Drop, desk.handle(events.Timeout(), at=13.0)).learner == 0
    timeout = 3.0 + TIMEOUT_SLACK * 10.0 / 2
    assert desk.core.next_deadline() == 10.0 + timeout
    assert only(actions.Drop, desk.handle(events.Timeout(), at=10.0 + timeout)).learner == 1


@pytest.mark.parametrize(("slow", "waits"), [(3.0, 3.0), (50.0, 6.0)])
def test_a_round_that_opens_late_waits_a_step_of_the_slowest_but_no_longer_than_a_merge(slow, waits):
    desk = Desk(num_learners=2, learners=2, num_fragments=1, interval=2, quorum=1, gamma=0.5)
    desk.report(1, 1, at=0.0)
    desk.report(0, 1, at=slow - 1.0)
    desk.report(1, 2, at=slow)
    desk.report(0, 2, at=slow, steps=2)
    desk.offer(0, (2, 0))
    desk.offer(1, (2, 0))
    assert desk.merging
    desk.report(0, 8, at=slow + 6.0, steps=8)
    desk.merged(2, 0)
    desk.report(0, 9, at=slow + 6.5)
    assert not merges(desk.offer(0, (8, 0)))
    assert desk.core.next_deadline() == slow + 6.5 + waits


@pytest.mark.parametrize(("opened_at", "waits"), [(5, 0.0), (7, 3.0)])
def test_a_round_that_opens_too_late_to_ask_ahead_waits_like_one_that_opens_after_its_step(opened_at, waits):
    desk = Desk(num_learners=2, learners=2, num_fragments=1, interval=4, quorum=1, gamma=0.5)
    for step in range(1, 5):
        desk.report(0, step, at=float(step), steps=step)
        desk.report(1, step, at=float(step), steps=step)
    desk.offer(0, (4, 0))
    desk.offer(1, (4, 0))
    assert desk.merging
    desk.report(0, opened_at, at=7.0, steps=opened_at)  # merges take three steps
    desk.report(1, opened_at, at=7.0, steps=opened_at)
    desk.merged(4, 0)
    for step in range(opened_at + 1, 9):
        desk.report(0, step, at=7.0 + step - opened_at, steps=step - 4)
    merged = merges(desk.offer(0, (8, 0)))
    assert bool(merged) == (not waits)


def test_an_offer_in_the_step_in_which_an_update_sets_the_clock_far_forward_is_merged():
    """Its learner was long without updates, so that its report is of a clock more than H behind."""
    desk = Desk(num_learners=2, learners=2, num_fragments=2, interval=4, quorum=1, gamma=0.0)
    for step in range(1, 41):
        desk.report(0, step, at=float(step))
        desk.settle()
    version = desk.core.versions[1]
    desk.handle(events.StepReported(Report(1, 1, 3, (FragmentCounters(1, 3, 30),) * 2)))
    desk.handle(
        events.StepReported(Report(1, 1, 4, (FragmentCounters(1, 4, 40), FragmentCounters(version, 1, 10))))
    )
    offer = events.FragmentArrived(RoundId(42, 1), Contribution(1, 1, 1, version, 40, 1, 10))
    assert not desk.handle(offer)
    assert desk.core.offers == {offer.contribution}
    assert desk.core.rounds[0].arrived[1] == offer.contribution


@pytest.mark.parametrize(("beyond", "fresh"), [(0, True), (10, True), (11, False)])
def test_an_offer_ages_by_the_steps_beyond_it_though_their_reports_come_late(beyond, fresh):
    desk = Desk(learners=2, num_learners=2, num_fragments=1, interval=20, quorum=2, gamma=0.0)
    for step in range(1, 20):
        for learner in (0, 1):
            desk.report(learner, step, at=float(step))
    early = Contribution(0, 1, 0, version=0, step=31, steps=13, tokens=130)
    assert not desk.handle(events.FragmentArrived(RoundId(20, 0), early), at=31.0)
    desk.report(0, 31 + beyond, steps=13 + beyond, at=31.0 + beyond)
    desk.report(1, 20, steps=2)
    assert merges(desk.offer(1, (20, 0))) == ([(20, 0, [0, 1])] if fresh else [])


def test_an_old_offer_is_merged_if_a_quorum_is_there_before_the_newer_one():
    """It does not count in the quorum; but to leave its learner out would lose all that it has done."""
    desk = Desk(learners=3, num_learners=3, num_fragments=1, interval=4, quorum=2, gamma=0.0)
    for learner in range(3):
        desk.report(learner, 2, at=2.0, steps=2)
    desk.report(0, 4, at=4.0, steps=4)
    desk.offer(0, (4, 0))
    assert asked(desk.report(0, 10, at=10.0, steps=10)) == [(0, 4, 0)]
    desk.report(1, 4, at=10.1, steps=4)
    assert not merges(desk.offer(1, (4, 0)))
    desk.report(2, 4, at=10.2, steps=4)
    out = desk.offer(2, (4, 0))
    assert merges(out) == [(4, 0, [0, 1, 2])]
    assert [c.steps for c in only(actions.Merge, out).contributions] == [4, 4, 4]
    late = desk.offer(0, (4, 0))
    assert only(actions.Drop, late).reason == "unexpected fragment"


def test_a_merge_that_waits_for_another_begins_only_with_a_quorum_of_offers_that_are_not_old():
    desk = Desk(learners=2, num_learners=2, num_fragments=2, interval=4, overlap=1, quorum=2, gamma=0.0)
    for learner in (0, 1):
        desk.report(learner, 2, at=2.0, steps=2)
    desk.offer(0, (2, 1))
    assert merges(desk.offer(1, (2, 1))) == [(2, 1, [0, 1])]
    for learner in (0, 1):
        desk.report(learner, 4, at=4.0, steps=4)
        assert not merges(desk.offer(learner, (4, 0)))
    assert (0, 4, 0) in asked(desk.report(0, 10, at=10.0, steps=10))
    assert not merges(desk.merged(2, 1))
    assert merges(desk.offer(0, (4, 0))) == [(4, 0, [0, 1])]


@pytest.mark.parametrize(("steps", "taken"), [(2, True), (4, True), (5, False)])
def test_work_that_goes_on_with_a_new_version_may_be_offered_before_a_report_names_the_version(steps, taken):
    """An update in mid-step leaves the steps taken since its offer, and the report of that step is older."""
    desk = Desk(learners=1, num_learners=1, num_fragments=1, interval=2, gamma=0.0)
    desk.report(0, 2, steps=2)
    desk.settle()
    known = Report(0, 1, 4, (FragmentCounters(0, 4, 40),))  # made before the update was there
    desk.handle(events.StepReported(known), at=4.0)
    marks = {"since": desk.core.state().watermarks[0][0], "upto": Watermark(0, 4)}
    given = Contribution(0, 1, 0, version=1, step=4, steps=steps, tokens=10 * steps, **marks)
    out = desk.handle(events.FragmentArrived(RoundId(4, 0), given))
    assert bool(merges(out)) is taken


def test_an_offer_that_was_left_out_of_its_merge_is_told_to_nobody_as_merged():
    desk = Desk(num_learners=3, num_fragments=1, interval=2, quorum=3, learners=3)
    for learner in range(3):
        desk.report(learner, 2, steps=2)
    for learner in range(3):
        desk.offer(learner, (2, 0))
    out = desk.handle(events.MergeFinished(RoundId(2, 0), left_out=(1,)))
    sent = [a for a in out if isinstance(a, actions.Send)]
    [told] = [a for a in sent if isinstance(a.event, events.UpdateArrived)]
    assert [told.to(learner).watermark.steps for learner in range(3)] == [2, 0, 2]
    (record,) = [a.values for a in out if isinstance(a, actions.Record) and a.name == "round"]
    assert (record["learners"], record["left_out"], record["quorum"]) == ([0, 2], [1], 2)
    assert record["tokens"] == sum(c[-1] for c in record["contributions"]) == 40


def refuse(desk, due, *learners):
    """The merge of a round ends, without the offers of these learners."""
    desk.merging.remove(RoundId(*due))
    return desk.handle(events.MergeFinished(RoundId(*due), left_out=learners))


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
    sent = [a for a in refuse(desk, (2, 0), 0) if isinstance(a, actions.Send)]
    [told] = [a for a in sent if isinstance(a.event, events.UpdateArrived)]
    assert [told.to(learner).watermark.steps for learner in range(2)] == [0, 2]


@pytest.mark.parametrize("end", ["lost", "refused too", "not sound"])
def test_whose_offer_was_refused_gives_alone_again_where_nobody_else_can(end):
    desk = offered_by([0], **ALONE)
    refuse(desk, (2, 0), 0)
    desk.report(0, 2, steps=2)
    match end:
        case "lost":
            assert not merges(desk.offer(0, (2, 0)))
            out = desk.handle(events.LearnerLost(1, 1, "its host died"))
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


def test_where_learners_wait_and_no_offer_may_be_merged_the_version_comes_once_more():
    """Blocked learners have no other offers: asked again they would wait for ever."""
    desk = offered_by([0, 1], **{**ALONE, "quorum": None}, max_run_ahead=0)
    out = refuse(desk, (2, 0), 0, 1)
    assert out == [actions.Merge(RoundId(2, 0), 1, ())]
    assert desk.core.versions == (0,)
    out = desk.handle(events.MergeFinished(RoundId(2, 0)))
    assert desk.core.state().versions == (1,) and desk.core.merged_steps == (2,)
    update = only(events.UpdateArrived, out)
    assert (update.version, update.step, update.watermark) == (1, 2, NOTHING_MERGED)
    (record,) = [a.values for a in out if isinstance(a, actions.Record) and a.name == "round"]
    assert (record["learners"], record["quorum"], record["tokens"]) == ([], 0, 0)
    assert record["left_out"] == [0, 1]


def test_where_all_are_needed_but_nobody_waits_all_give_again_after_a_merge_of_nothing():
    desk = offered_by([0, 1], **{**ALONE, "quorum": None})
    assert records(refuse(desk, (2, 0), 0, 1), "round_refused")
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


@pytest.mark.parametrize("why", ["refused", "not sound"])
def test_a_last_round_does_not_wait_for_offers_that_are_never_merged_though_learners_take_turns(why):
    """With every sign of life of one, another that had failed seemed to have something left."""
    desk = offered_by([], **ALONE, total_steps=2)
    for turn in range(20):
        learner = turn % 2
        for m in (0, 1):
            desk.report(m, 2, steps=2)
        if why == "refused":
            desk.offer(learner, (2, 0))
            out = refuse(desk, (2, 0), learner)
        else:
            out = desk.fail(learner, (2, 0))
        if out[-1] == actions.Finish():
            break
    assert turn == (1 if why == "refused" else 7)
    assert records(out, "round_abandoned")


def _overtakes(steps):
    """Learner 0's offer of so many steps, of which it has reported two of a clock that is six behind."""
    return events.FragmentArrived(RoundId(4, 0), Contribution(0, 1, 0, 0, 8, steps, 10 * steps))


def _asked_after_two_steps():
    desk = Desk(learners=2, num_learners=2, num_fragments=1, interval=4, quorum=2, gamma=0.0)
    desk.report(0, 2, at=2.0, steps=2)
    desk.report(1, 2, at=2.0, steps=2)
    return desk


def test_an_offer_that_overtakes_the_reports_of_its_work_is_kept_until_these_come():
    desk = _asked_after_two_steps()
    assert not desk.handle(_overtakes(8))
    assert not desk.core.rounds[0].arrived and desk.core.offers == {_overtakes(8).contribution}
    assert not [a for a in desk.report(0, 3, steps=3) if isinstance(a, actions.Drop | actions.Release)]
    assert not desk.core.rounds[0].arrived and desk.core.offers == {_overtakes(8).contribution}
    desk.report(0, 8, steps=8)
    assert desk.core.rounds[0].arrived == {0: _overtakes(8).contribution}
    assert desk.core.offers == {_overtakes(8).contribution}


@pytest.mark.parametrize("then", ["a newer offer", "its learner is lost"])
def test_an_offer_that_waits_for_reports_in_vain_is_released(then):
    desk = _asked_after_two_steps()
    desk.handle(_overtakes(8))
    newer = then == "a newer offer"
    out = desk.handle(_overtakes(9) if newer else events.LearnerLost(0, 1, "broken"))
    assert only(actions.Release, out).offer == _overtakes(8).contribution
    assert desk.core.offers == ({_overtakes(9).contribution} if newer else set())


def test_whatever_comes_of_an_offer_its_arrays_are_released_or_merged():
    desk = _asked_after_two_steps()
    desk.report(0, 4, at=4.0, steps=4)
    first = desk.offer(0, (4, 0))
    assert not [a for a in first if isinstance(a, actions.Release)]
    again = only(actions.Drop, desk.offer(0, (4, 0)))  # the same a second time: the first is still needed
    assert again.reason == "unexpected fragment" and len(desk.core.offers) == 1
    desk.report(0, 10, at=10.0, steps=10)
    replaced = only(actions.Release, desk.offer(0, (4, 0)))
    assert replaced.offer.steps == 4
    desk.report(1, 4, at=10.1, steps=4)
    merge = only(actions.Merge, desk.offer(1, (4, 0)))
    assert [c.steps for c in merge.contributions] == [10, 4] and not desk.core.offers
    assert only(actions.Release, desk.offer(1, (4, 0))).offer in merge.contributions


# Late offers.


def _missed_by_learner_1(rebase=True):
    """Learner 1's offer is still on its way while learner 0's is merged."""
    desk = Desk(learners=2, num_fragments=1, interval=4, quorum=1, gamma=0.0, rebase=rebase)
    for learner in (0, 1):
        for step in range(1, 5):
            desk.report(learner, step, steps=step, at=float(step))
    assert merges(desk.offer(0, (4, 0))) == [(4, 0, [0])]
    return desk


def _next_merge(desk):
    """Learner 0 steps on and offers; of learner 1 nothing is heard but what has arrived."""
    early = [m for at in range(5, 9) for m in merges(desk.report(0, at, steps=at - 4, at=float(at)))]
    return early + merges(desk.offer(0, (8, 0)))


@pytest.mark.parametrize("between", [False, True])
def test_an_offer_that_misses_its_round_is_merged_in_the_next_one(between):
    desk = _missed_by_learner_1()
    if between:
        desk.merged(4, 0)
    out = desk.offer(1, (4, 0))
    assert (
        not [a for a in out if isinstance(a, actions.Drop | actions.Release)] and len(desk.core.offers) == 1
    )
    assert desk.core.furthest(1) == Watermark(0, 4), "where a process of the learner would go on"
    if not between:
        desk.merged(4, 0)
    assert _next_merge(desk) == [(8, 0, [0, 1])]
    update = only(events.UpdateArrived, desk.merged(8, 0))
    assert update.version == 2 and desk.core.state().watermarks[0][1].steps == 4


def test_the_data_of_a_learner_whose_late_offer_is_dropped_with_it_are_drawn_again():
    desk = _missed_by_learner_1()
    desk.offer(1, (4, 0))
    desk.handle(events.LearnerLost(1, 1, "killed"))
    welcome = only(events.Welcomed, desk.handle(events.LearnerJoined(1, 2)))
    assert welcome.data == NOTHING_MERGED and not desk.core.offers


def test_an_offer_of_work_that_is_merged_by_then_is_dropped():
    desk = _missed_by_learner_1()
    late = desk.reports[1]
    desk.merged(4, 0)
    desk.offer(1, (4, 0))
    assert _next_merge(desk) == [(8, 0, [0, 1])]
    desk.merged(8, 0)
    known = late.counters[0]
    again = Contribution(1, 1, 0, known.version, 4, known.steps, known.tokens, upto=Watermark(0, 5))
    out = desk.handle(events.FragmentArrived(RoundId(4, 0), again))
    assert only(actions.Release, out).offer == again and not desk.core.offers


def test_late_work_on_a_version_of_no_history_is_dropped():
    desk = _missed_by_learner_1()
    desk.merged(4, 0)
    known = desk.reports[1].counters[0]
    late = Contribution(1, 1, 0, 0, 4, known.steps, known.tokens, lineage=7, upto=Watermark(0, 4))
    out = desk.handle(events.FragmentArrived(RoundId(4, 0), late))
    assert only(actions.Release, out).offer == late and not desk.core.offers


def test_work_counts_on_the_last_versions_of_this_history():
    updates = Updates(SyncPolicy(num_fragments=1), SyncerState((5,), (20,), lineages=(3,)), (0,), lineage=4)
    for turn in range(MAX_AGE + 1):
        assert updates.made(0, 5, 3) and not updates.made(0, 5, 4)
        updates.add(RoundId(24 + turn, 0), ())
    assert not updates.made(0, 5, 3) and updates.made(0, 6, 4) and updates.made(0, 6 + MAX_AGE, 4)


def test_without_rebase_an_offer_that_misses_its_round_is_dropped():
    desk = _missed_by_learner_1(rebase=False)
    assert only(actions.Drop, desk.offer(1, (4, 0))).reason == "unexpected fragment"
    assert not desk.core.offers
