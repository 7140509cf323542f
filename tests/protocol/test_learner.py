"""The learner's core: its driver's mistakes raise, the syncer's are dropped; offers, bounds, ends."""

import pytest

from ddiloco.protocol import actions, events
from ddiloco.protocol.errors import LocalProtocolError
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.policy import SyncPolicy


def welcomed(total_steps=None, *, at_step=0, **policy):
    core = LearnerCore(0, 1, SyncPolicy(**policy), total_steps)
    fragments = core.policy.num_fragments
    core.handle(events.Welcomed(1, at_step, (0,) * fragments, (0,) * fragments), 0.0)
    return core


def start(core, tokens=10):
    return core.handle(events.StepStarted(tokens), 0.0)


def finish(core):
    return core.handle(events.StepFinished(), 0.0)


def offers(out):
    return [action.contribution for action in out if isinstance(action, actions.MakeOffer)]


def test_a_step_before_the_welcome_is_the_drivers_mistake():
    core = LearnerCore(0, 1, SyncPolicy())
    with pytest.raises(LocalProtocolError, match="before recovery"):
        start(core)


def test_a_step_past_the_last_one_is_the_drivers_mistake():
    core = welcomed(total_steps=1)
    start(core)
    with pytest.raises(LocalProtocolError, match="past the last step"):
        start(core)


def test_a_step_while_blocked_is_the_drivers_mistake():
    core = welcomed(num_fragments=1, interval=1, quorum=None, max_run_ahead=0)
    start(core)
    with pytest.raises(LocalProtocolError, match="while blocked"):
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
    ],
)
def test_a_wrong_message_after_the_welcome_is_dropped_and_changes_nothing(event, reason):
    core = welcomed(num_fragments=2)
    assert core.handle(event, 0.0) == [actions.Drop(0, reason)]
    assert (core.clock, core.versions) == (0, (0, 0))


def test_what_is_published_is_what_a_step_left_even_if_an_update_came_since():
    core = welcomed(num_fragments=1, interval=2)
    for _ in range(2):
        start(core, tokens=5)
    core.handle(events.UpdateArrived(0, 1, 2), 0.0)
    finish(core)
    publish, report = finish(core)
    offer = publish.contribution
    assert (offer.version, offer.steps, offer.tokens) == (0, 2, 10)
    assert report.event.report.counters[0].version == 0


def test_offers_are_made_when_due_and_for_the_overlap_after_and_then_no_more():
    core = welcomed(num_fragments=1, interval=10, overlap=2)
    taken = [bool(offers(start(core))) for _ in range(18)]
    assert [step for step, was in enumerate(taken, start=1) if was] == [10, 11, 12]


def test_no_offer_is_taken_once_the_update_of_the_due_step_is_applied():
    core = welcomed(num_fragments=1, interval=4, overlap=3)
    for _ in range(4):
        start(core)
    core.handle(events.UpdateArrived(0, 1, 4), 0.0)
    assert not any(offers(start(core)) for _ in range(3))
    assert offers(start(core))


def test_a_learner_that_joins_after_a_due_step_offers_its_first_step():
    core = welcomed(at_step=9, num_fragments=1, interval=5, overlap=1)
    (offer,) = offers(start(core))
    assert (offer.step, offer.steps) == (10, 1)
    late = welcomed(at_step=13, num_fragments=1, interval=10, overlap=1)
    assert [len(offers(start(late))) for _ in range(3)] == [1, 0, 0]


def test_a_due_step_from_before_it_joined_does_not_bind_a_learner():
    core = welcomed(at_step=4, num_fragments=1, interval=4, quorum=None, max_run_ahead=0)
    assert not core.blocked
    for _ in range(4):
        start(core)
    assert core.blocked


@pytest.mark.parametrize("bound", [0, 1, 2, 3])
def test_the_bound_is_the_number_of_steps_past_a_missing_update(bound):
    core = welcomed(num_fragments=1, interval=4, quorum=None, max_run_ahead=bound)
    while not core.blocked:
        start(core)
    assert core.clock == 4 + bound


def test_a_due_step_that_the_clock_jumped_over_binds_from_the_next_step_on():
    core = welcomed(num_fragments=2, interval=2, quorum=None, max_run_ahead=0)
    core.handle(events.UpdateArrived(0, 1, 2), 0.0)
    assert not core.blocked
    assert [offer.fragment for offer in offers(start(core))] == [1]
    assert core.blocked


def test_an_unbounded_learner_is_never_blocked():
    core = welcomed(num_fragments=3, interval=2)
    for _ in range(50):
        start(core)
        assert not core.blocked


def test_a_heartbeat_speaks_only_when_no_step_is_under_way():
    core = welcomed(num_fragments=1)
    start(core)
    assert core.handle(events.Heartbeat(), 0.0) == []
    finish(core)
    (beat,) = core.handle(events.Heartbeat(), 0.0)
    assert (beat.event.report.step, beat.event.report.counters[0].steps) == (1, 1)


def test_a_clock_that_an_update_takes_to_the_end_is_reported_once():
    core = welcomed(total_steps=6, num_fragments=1, interval=3)
    start(core)
    finish(core)
    apply, report = core.handle(events.UpdateArrived(0, 1, 6), 0.0)
    assert isinstance(apply, actions.ApplyUpdate) and report.event.report.step == 6 and core.done
    assert len(core.handle(events.UpdateArrived(0, 2, 6), 0.0)) == 1


def test_the_last_step_is_reported_once():
    core = welcomed(total_steps=2, num_fragments=1, interval=3)
    for _ in range(2):
        start(core)
    assert [action.event.report.step for action in finish(core)] == [1]
    assert [action.event.report.step for action in finish(core)] == [2]


def test_mixing_travels_with_the_update():
    core = welcomed(num_fragments=1, mixing=0.5)
    assert core.handle(events.UpdateArrived(0, 1, 1), 0.0) == [actions.ApplyUpdate(0, 1, 0.5)]


def test_a_clock_set_between_steps_offers_the_fragments_at_once():
    core = welcomed(num_fragments=2, interval=4)
    start(core)
    finish(core)
    take, publish, report = core.handle(events.ClockSet(2), 0.0)
    assert core.clock == 2
    assert take.contribution == publish.contribution
    assert (publish.contribution.fragment, publish.contribution.step, publish.contribution.steps) == (1, 2, 1)
    assert report.event.report.step == 2


def test_a_clock_set_offers_nothing_of_a_fragment_without_new_steps():
    core = welcomed(num_fragments=1, interval=4)
    assert offers(core.handle(events.ClockSet(4), 0.0)) == []
    assert offers(start(core)) != []


def test_a_clock_that_is_set_back_is_ignored():
    core = welcomed(num_fragments=1, interval=4)
    start(core)
    assert core.handle(events.ClockSet(1), 0.0) == []
    assert core.clock == 1


def test_a_learner_that_was_not_welcomed_asks_again_at_each_heartbeat():
    core = LearnerCore(3, 1, SyncPolicy())
    for _ in range(2):
        assert core.handle(events.Heartbeat(), 0.0) == [actions.TellSyncer(events.LearnerJoined(3, 1))]


def test_a_learner_that_is_no_member_comes_back_with_what_it_holds_and_loses_no_step():
    core = welcomed(num_fragments=2, interval=2)
    start(core)
    back = actions.TellSyncer(events.LearnerJoined(0, 2, 0, (0, 0)))
    assert core.handle(events.NotMember(1), 0.0) == [back]
    publish, report = finish(core)
    assert (publish.contribution.incarnation, report.event.report.incarnation) == (2, 2)
    assert (report.event.report.step, report.event.report.counters[0].steps) == (1, 1)


@pytest.mark.parametrize("incarnation", [0, 2])
def test_word_of_another_incarnation_changes_nothing(incarnation):
    core = welcomed()
    assert core.handle(events.NotMember(incarnation), 0.0) == []
    assert core.handle(events.Rejected(incarnation, "a newer one is known"), 0.0) == []
    assert core.incarnation == 1


def test_a_learner_whose_place_was_taken_leaves():
    core = welcomed()
    out = core.handle(events.Rejected(1, "a newer one is known"), 0.0)
    assert out == [actions.Leave("a newer one is known")]


def test_a_blocked_learner_keeps_reporting_so_that_it_hears_that_it_is_no_member():
    core = welcomed(num_fragments=1, interval=1, quorum=None, max_run_ahead=0)
    start(core)
    finish(core)
    assert core.blocked
    (beat,) = core.handle(events.Heartbeat(), 0.0)
    assert beat.event.report.incarnation == 1
    core.handle(events.NotMember(1), 0.0)
    assert core.blocked
    (beat,) = core.handle(events.Heartbeat(), 0.0)
    assert beat.event.report.incarnation == 2


def test_a_welcome_to_one_that_returned_replaces_all_it_held():
    core = welcomed(num_fragments=2, interval=2, total_steps=6, at_step=4)
    start(core)
    start(core)
    assert core.done
    core.handle(events.NotMember(1), 0.0)
    out = core.handle(events.Welcomed(2, 1, (0, 1), (0, 1)), 0.0)
    assert out == [actions.AdoptAll(1, (0, 1))]
    assert (core.clock, core.versions, core.done) == (1, (0, 1), False)
    assert finish(core) == finish(core) == []
    start(core)
    assert [c.steps for c in finish(core)[-1].event.report.counters] == [1, 1]
