"""The learner's core: its driver's mistakes raise, the syncer's are dropped; offers, bounds, ends."""

import dataclasses

import pytest

from ddiloco.protocol import actions, events
from ddiloco.protocol.errors import LocalProtocolError
from ddiloco.protocol.learner import KEPT_OFFERS, LearnerCore
from ddiloco.protocol.messages import NOTHING_MERGED, RoundId, Watermark
from ddiloco.protocol.policy import MAX_AGE, SyncPolicy
from tests.protocol.learner_desk import ask, finish, made, sent, start, step, welcomed


def test_a_step_before_the_welcome_is_the_drivers_mistake():
    core = LearnerCore(0, 1, SyncPolicy())
    with pytest.raises(LocalProtocolError, match="before recovery"):
        start(core)


def test_the_end_of_a_step_that_never_started_is_the_drivers_mistake():
    core = welcomed()
    with pytest.raises(LocalProtocolError, match="finished that was never started"):
        finish(core)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (events.Welcomed(1, 0, (0, 0, 0), (0, 0)), "welcome with another number of fragments"),
        (events.Welcomed(1, 0, (0, 0), (0,)), "welcome with another number of fragments"),
        (events.UpdateArrived(0, 1, 1), "update before welcome"),
        (events.OfferAsked(RoundId(1, 0), 0, 1), "asked before welcome"),
    ],
)
def test_a_wrong_message_before_the_welcome_is_dropped(event, reason):
    core = LearnerCore(0, 1, SyncPolicy(num_fragments=2))
    assert core.handle(event, 0.0) == [actions.Drop(0, reason)]
    assert not core.recovered


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (events.Welcomed(1, 7, (3, 3), (6, 6)), "welcomed twice"),
        (events.UpdateArrived(2, 1, 1), "update of an unknown fragment"),
        (events.UpdateArrived(-1, 1, 1), "update of an unknown fragment"),
        (events.UpdateArrived(0, 0, 9), "stale update"),
        (events.OfferAsked(RoundId(1, 2), 0, 1), "asked for an unknown fragment"),
        (events.OfferAsked(RoundId(1, -1), 0, 1), "asked for an unknown fragment"),
    ],
)
def test_a_wrong_message_after_the_welcome_is_dropped_and_changes_nothing(event, reason):
    core = welcomed(num_fragments=2)
    assert core.handle(event, 0.0) == [actions.Drop(0, reason)]
    assert (core.clock, core.versions) == (0, (0, 0))


def test_an_offer_that_an_update_has_overtaken_is_not_sent():
    core = welcomed(num_fragments=2, interval=2)
    ask(core, 1)
    start(core, tokens=5)
    core.handle(events.UpdateArrived(0, 1, 1), 0.0)
    out = finish(core)
    assert sent(out) == []
    assert out[0].event.report.counters[0].version == 0


def fragments(contributions):
    return [c.fragment for c in contributions]


def of_four(core):
    for fragment in range(4):
        ask(core, 1, due=4 + fragment, fragment=fragment)
    return core


def test_where_the_link_takes_nothing_offers_are_held_back_and_made_in_the_order_of_their_rounds():
    core = of_four(welcomed(num_fragments=4, interval=4))
    out = [(fragments(made(start(core, waiting=waiting))), finish(core)) for waiting in (4, 4, 3, 2, 2)]
    assert [one for one, _ in out] == [[], [], [], [], []], "of 3 it took 1: 2 may wait"
    out = [(fragments(made(start(core, waiting=waiting))), finish(core)) for waiting in (1, 1, 0)]
    assert [one for one, _ in out] == [[0], [1], [2, 3]]
    assert [fragments(sent(one)) for _, one in out] == [[0], [1], [2, 3]]


def test_a_link_that_takes_all_holds_nothing_back():
    core = of_four(welcomed(num_fragments=4, interval=4))
    assert fragments(made(start(core))) == [0, 1, 2, 3]


def test_where_learners_wait_for_merges_no_offer_is_held_back():
    core = of_four(welcomed(num_fragments=4, interval=4, quorum=None, max_run_ahead=1))
    assert fragments(made(start(core, waiting=4))) == [0, 1, 2, 3]


def test_what_was_held_back_is_offered_after_the_last_step():
    core = of_four(welcomed(total_steps=1, num_fragments=4, interval=4))
    assert made(start(core, waiting=4)) == []
    assert fragments(sent(finish(core))) == [0, 1, 2, 3]


def test_a_learner_that_is_asked_for_the_same_state_again_sends_it_again_but_copies_it_once():
    core = welcomed(num_fragments=1, interval=4)
    step(core)
    ((copy,), (first,)) = (kind(out) for out in [ask(core, 0, due=4)] for kind in (made, sent))
    again = ask(core, 0, due=4)
    assert made(again) == [] and sent(again) == [first] == [copy]


def test_of_two_questions_for_a_fragment_the_later_one_counts():
    core = welcomed(num_fragments=1, interval=8)
    ask(core, 8)
    ask(core, 2, due=8)
    assert [core.clock for _ in range(9) if made(start(core))] == [2]


def test_a_question_about_a_version_that_was_replaced_is_forgotten():
    core = welcomed(num_fragments=1, interval=4)
    ask(core, 4)
    core.handle(events.UpdateArrived(0, 1, 2), 0.0)
    assert not any(made(start(core)) for _ in range(6))


def test_a_question_about_a_version_that_is_yet_to_come_waits_for_it():
    core = welcomed(num_fragments=1, interval=4)
    ask(core, 3, due=4, version=1)
    assert not any(made(start(core)) for _ in range(4))
    core.handle(events.UpdateArrived(0, 1, 4), 0.0)
    (offer,) = made(start(core))
    assert (offer.version, offer.steps) == (1, 1)


def test_a_due_step_from_before_it_joined_does_not_bind_a_learner():
    core = welcomed(at_step=4, num_fragments=1, interval=4, quorum=None, max_run_ahead=0)
    assert not core.blocked
    for _ in range(4):
        start(core)
    assert core.blocked


def test_a_heartbeat_in_mid_step_repeats_the_last_report():
    """The step that is under way is not done: a long one must not look like two."""
    core = welcomed(num_fragments=1)
    start(core)
    (first,) = core.handle(events.Heartbeat(), 0.0)  # a first step of minutes is no silence
    assert (first.event.report.step, first.event.report.counters[0].steps) == (0, 0)
    (said,) = finish(core)
    start(core, tokens=99)
    assert core.handle(events.Heartbeat(), 0.0) == [said]
    assert (said.event.report.step, said.event.report.counters[0].steps) == (1, 1)


def test_who_rejoins_in_mid_step_goes_on_with_signs_of_life():
    core = welcomed(num_fragments=1)
    (said,) = step(core)
    start(core)
    core.handle(events.NotMember(core.incarnation), 0.0)
    (again,) = core.handle(events.Heartbeat(), 0.0)
    known = dataclasses.replace(said.event.report, incarnation=core.incarnation, adopted=False, shards=())
    assert again.event.report == known


def test_mixing_travels_with_the_update():
    core = welcomed(num_fragments=1, mixing=0.5)
    assert core.handle(events.UpdateArrived(0, 1, 1), 0.0) == [actions.ApplyUpdate(0, 1, 0.5)]


def test_a_learner_called_to_the_end_between_steps_reports_and_offers_what_it_was_asked_for_at_once():
    core = welcomed(total_steps=4, num_fragments=2, interval=4)
    ask(core, 4)
    step(core)
    report, copy, offer = core.handle(events.ClockSet(4), 0.0)
    assert core.done and report.event.report.step == 4
    assert copy.contribution == offer.contribution
    assert (offer.contribution.fragment, offer.contribution.step, offer.contribution.steps) == (0, 4, 1)


def test_a_learner_called_to_the_end_offers_nothing_of_a_fragment_without_new_steps():
    core = welcomed(total_steps=4, num_fragments=1, interval=4)
    ask(core, 4)
    assert made(core.handle(events.ClockSet(4), 0.0)) == []


def offered_then_stepped(**policy):
    """Offers after step 2, of 25 tokens, then takes two more steps, of 11."""
    core = welcomed(num_fragments=1, interval=4, **policy)
    ask(core, 2, due=4)
    for tokens in (10, 15, 5, 6):
        step(core, tokens)
    return core


@pytest.mark.parametrize(
    ("version", "mark"),
    [(1, Watermark(7, 2)), (1, Watermark(1, 3)), (2, Watermark(1, 1))],
    ids=["of another life", "an offer that it never made", "a later version"],
)
def test_an_update_with_work_that_the_learner_has_no_copy_of_replaces_all_that_it_had(version, mark):
    core = offered_then_stepped(rebase=True)
    out = core.handle(events.UpdateArrived(0, version, 4, mark), 0.0)
    assert out == [actions.ApplyUpdate(0, version, 0.0)]
    assert [(f.version, f.steps, f.tokens) for f in core.work.fragments] == [(version, 0, 0)]


@pytest.mark.parametrize("rebase", [True, False])
def test_of_a_learner_that_is_in_no_update_nothing_is_lost_with_rebase(rebase):
    """Its work counts on from the same step, however many versions are made without it."""
    core = offered_then_stepped(rebase=rebase)
    steps = core.work.fragments[0].steps
    for version in (1, 3):
        out = core.handle(events.UpdateArrived(0, version, 4, NOTHING_MERGED), 0.0)
        assert out == [actions.ApplyUpdate(0, version, 0.0, None, rebase)]
        assert core.work.fragments[0].steps == (steps if rebase else 0) > -1
        assert core.offered == ({2} if rebase else set()), "only what can be added to any version"


def test_an_offer_may_be_in_a_later_version_than_the_next_and_what_came_after_it_is_kept():
    core = offered_then_stepped(rebase=True)
    core.handle(events.UpdateArrived(0, 1, 4, NOTHING_MERGED), 0.0)
    out = core.handle(events.UpdateArrived(0, 2, 8, Watermark(1, 2)), 0.0)
    assert out == [actions.ApplyUpdate(0, 2, 0.0, 2, True)]
    assert [(f.steps, f.tokens) for f in core.work.fragments] == [(2, 11)] and not core.offered


def test_a_request_outlives_an_update_without_the_learners_work():
    core = welcomed(num_fragments=1, interval=4, rebase=True)
    step(core, 10)
    ask(core, 3, due=4)
    core.handle(events.UpdateArrived(0, 1, 2, NOTHING_MERGED), 0.0)
    step(core, 10)
    start(core)
    [offer] = sent(finish(core))
    assert (offer.version, offer.steps, offer.since) == (1, 3, NOTHING_MERGED)


def test_unmerged_work_that_is_too_old_is_overwritten():
    core = offered_then_stepped(rebase=True)
    for version in range(1, MAX_AGE + 1):
        core.handle(events.UpdateArrived(0, version, 4 * version, NOTHING_MERGED), 0.0)
    assert core.work.fragments[0].steps == 4
    out = core.handle(events.UpdateArrived(0, MAX_AGE + 1, 99, NOTHING_MERGED), 0.0)
    assert [type(action) for action in out] == [actions.Drop, actions.ApplyUpdate]
    assert not out[1].rebase and core.work.fragments[0].steps == 0 and not core.offered


def test_work_is_as_old_as_its_first_step_however_many_versions_came_before_it():
    core = welcomed(num_fragments=1, interval=4, rebase=True)
    for version in range(1, MAX_AGE + 3):
        core.handle(events.UpdateArrived(0, version, version, NOTHING_MERGED), 0.0)
    step(core, 10)
    out = core.handle(events.UpdateArrived(0, MAX_AGE + 3, 99, NOTHING_MERGED), 0.0)
    assert not [action for action in out if isinstance(action, actions.Drop)]
    assert core.work.fragments[0].steps == 1


def test_of_offers_that_are_never_merged_the_newest_are_kept():
    core, left = welcomed(num_fragments=1, interval=4, rebase=True), []
    for clock in range(1, 100):
        ask(core, clock)
        assert len(made(start(core))) == 1
        assert [offer.step for offer in sent(finish(core))] == [clock]
        left.append(len(core.work.fragments[0].offered))
    assert max(left) == left[-1] == KEPT_OFFERS
    out = core.handle(events.UpdateArrived(0, 1, 99, Watermark(1, 99 - KEPT_OFFERS)), 0.0)
    assert out == [actions.ApplyUpdate(0, 1, 0.0)]


def test_an_offer_whose_copy_was_given_up_before_its_step_was_complete_is_not_sent():
    core = welcomed(num_fragments=1, interval=4)
    for clock in range(1, KEPT_OFFERS + 2):
        ask(core, clock)
        start(core)
    offered = [[offer.step for offer in sent(finish(core))] for _ in range(KEPT_OFFERS + 1)]
    assert offered == [[], *([clock] for clock in range(2, KEPT_OFFERS + 2))]


def test_a_clock_that_is_set_back_is_ignored():
    core = welcomed(num_fragments=1, interval=4)
    start(core)
    assert core.handle(events.ClockSet(1), 0.0) == []
    assert core.clock == 1
