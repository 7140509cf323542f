"""Steps that change nothing are in no counter, though offers are made while they are still under way."""

from ddiloco.protocol import events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import FragmentCounters, Watermark
from tests.protocol.learner_desk import ask, finish, made, sent, start, welcomed


def skip(core):
    return core.handle(events.StepFinished(skipped=True), 0.0)


def reported(out):
    return [action.event.report.counters for action in out if hasattr(action, "event")]


def test_reports_count_the_steps_that_were_not_skipped():
    core = welcomed(num_fragments=2, interval=4)
    told = []
    for tokens, end in ((10, finish), (11, skip), (12, skip), (13, finish)):
        start(core, tokens)
        told += reported(end(core))
    counts = [(1, 10), (1, 10), (1, 10), (2, 23)]
    assert told == [(FragmentCounters(0, *count),) * 2 for count in counts]
    assert core.clock == 4, "it was a step all the same"


def test_an_offer_made_while_steps_are_under_way_is_sent_without_those_that_are_skipped():
    core = welcomed(num_fragments=1, interval=4)
    ask(core, 3)
    out = [action for tokens in (10, 11, 12) for action in start(core, tokens)]
    [provisional] = made(out)
    assert (provisional.step, provisional.steps, provisional.tokens) == (3, 3, 33)
    assert sent(skip(core)) == sent(finish(core)) == []
    [offer] = sent(skip(core))
    assert (offer.step, offer.steps, offer.tokens) == (3, 1, 11)


def test_who_has_skipped_all_steps_offers_the_first_that_is_not():
    core = welcomed(num_fragments=1, interval=4)
    ask(core, 2)
    start(core)
    start(core, 5)  # with the offer that turns out to be empty
    start(core, 7)
    assert sent(skip(core)) == sent(skip(core)) == []
    [offer] = sent(finish(core))
    assert (offer.step, offer.steps, offer.tokens) == (3, 1, 7)


def test_a_step_that_is_skipped_after_an_update_came_is_not_taken_from_the_work_since():
    core = welcomed(num_fragments=1, interval=4)
    for tokens in (10, 11, 12):
        start(core, tokens)
        finish(core)
    start(core, 13)
    core.handle(events.UpdateArrived(0, 1, 3), 0.0)
    start(core, 14)
    assert reported(skip(core)) == [(FragmentCounters(0, 3, 33),)]
    assert reported(finish(core)) == [(FragmentCounters(1, 1, 14),)]


def test_with_rebase_the_work_since_an_offer_lacks_what_was_skipped_since():
    core = welcomed(num_fragments=1, interval=4, rebase=True)
    ask(core, 2)
    start(core, 10)
    start(core, 11)
    skip(core)
    [offer] = sent(finish(core))
    assert (offer.steps, offer.tokens) == (1, 11)
    start(core, 12)
    start(core, 13)
    core.handle(events.UpdateArrived(0, 1, 2, Watermark(1, 2)), 0.0)
    skip(core)
    finish(core)
    assert reported(core.handle(events.Heartbeat(), 0.0)) == [(FragmentCounters(1, 1, 13),)]


def test_who_has_nothing_to_wait_with_does_not_wait():
    core = welcomed(num_fragments=1, interval=2, quorum=None, max_run_ahead=0, overlap=0)
    start(core)
    start(core)
    assert core.blocked
    skip(core)
    skip(core)
    assert not core.blocked


def test_the_state_that_a_learner_leaves_has_no_skipped_step():
    core = welcomed(num_fragments=1, interval=8)
    for end in (finish, skip, finish):
        start(core)
        end(core)
    [work] = core.work.fragments
    assert (work.steps, work.tokens) == (2, 20)
    again = LearnerCore(0, 2, core.policy)
    again.resume(core.work)
    start(again, 5)
    assert reported(skip(again)) == [(FragmentCounters(0, 2, 20),)]
