"""What waits on either side: bounded, coalesced, and never in anybody's way."""

import dataclasses

import numpy as np
import pytest

from ddiloco.goodput.accounting import State
from ddiloco.protocol import events
from ddiloco.protocol.messages import RoundId, Watermark
from ddiloco.remote.learner.outbox import Outbox
from ddiloco.remote.syncer.downlink import Downlink, NewestFragments
from ddiloco.remote.syncer.session import MAX_WAITING, Session
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.calls import Refused
from ddiloco.remote.wire.event_messages import from_syncer
from ddiloco.telemetry import records
from ddiloco.workers.exchange import EventDelivery
from tests.remote.ends import Taker, arrays, asked, report, until, update, welcome


def test_what_waits_for_a_slow_learner_is_each_fragment_once_in_its_newest_version():
    down = Downlink(NewestFragments())
    for version in range(1, 100):
        for p in (0, 1):
            down.put(update(p, version, step=version))
    taker = Taker(down)
    taken = [taker.next() for _ in range(2)]
    assert [taken_update for _, taken_update, _ in taken] == [events.UpdateArrived(p, 99, 99) for p in (0, 1)]
    assert (taken[0][2][1] == 99).all()
    down.close()
    with pytest.raises(StopIteration):
        taker.next()


def test_an_update_that_was_sent_is_not_sent_again_over_the_same_connection():
    down = Downlink(NewestFragments())
    taker = Taker(down)
    down.put(update(0, 1))
    assert taker.next()[1].version == 1
    down.put(update(0, 1))  # the syncer's core has not seen it arrive yet
    down.put(update(1, 1))
    assert taker.next()[1].fragment == 1


def test_versions_are_shared_by_all_links_so_that_slow_learners_hold_no_old_ones():
    newest = NewestFragments()
    slow, fast = Downlink(newest), Downlink(newest)
    first, second = update(0, 1), update(0, 2)
    slow.put(first)
    fast.put(second)
    assert newest.get(0).pieces is second.fragments[0]
    assert Taker(slow).next()[1].version == 2


@pytest.mark.parametrize("another", [welcome(100, step=4, version=1), update(0, 1, step=4)])
def test_each_learner_is_told_its_own_watermark_whatever_another_is_sent(another):
    newest, marks = NewestFragments(), {0: Watermark(100, 2, "here"), 1: Watermark(101, 3)}
    waiting, joining = Downlink(newest), Downlink(newest, learner=1)
    told = events.UpdateArrived(0, 1, 4, marks[0])
    waiting.put(EventDelivery(told, [arrays(0, 1)], watermarks={0: marks}))
    joining.put(dataclasses.replace(another, watermarks={0: marks}))
    taken = Taker(waiting).next()[1].watermark, Taker(joining).next()[1].watermark
    assert taken == (marks[0], marks[1]) and taken[0].position == ""


def drain(outbox, count):
    messages = outbox.messages(outbox.connected())
    outbox.accepted()
    return [pb.FromLearner.FromString(next(messages)) for _ in range(count)]


def test_of_the_reports_that_wait_only_the_newest_is_sent():
    outbox = Outbox(0)
    outbox.send(events.LearnerReady(0, 1, 0, (0, 0)))
    for step in range(1, 1001):
        outbox.send(report(0, 1, step))
    ready, last = drain(outbox, 2)
    assert (ready.event.WhichOneof("kind"), last.event.step_reported.report.step) == ("learner_ready", 1000)


def test_a_message_that_follows_records_is_never_sent_before_them():
    outbox, message = Outbox(0), pb.FromLearner(goodbye=True)
    for step in (1, 2):
        outbox.record(records.StepDone(0, step, 0.0, 10, {}))
    outbox.say_after_records(message)
    sent, last = drain(outbox, 2)
    assert [r.step_done.step for r in sent.records.records] == [1, 2]
    assert last.WhichOneof("kind") == "goodbye"


def test_a_record_is_sent_once_and_waits_for_a_connection():
    outbox = Outbox(0)
    for step in range(1, 4):
        outbox.record(records.StepDone(0, step, 0.0, 10, {"loss": np.float32(1)}))
    [sent] = drain(outbox, 1)
    assert (sent.records.first, [r.step_done.step for r in sent.records.records]) == (0, [1, 2, 3])
    outbox.disconnected()
    outbox.record(records.StepDone(0, 4, 0.0, 10, {}))
    [sent] = drain(outbox, 1)
    assert (sent.records.first, [r.step_done.step for r in sent.records.records]) == (3, [4])


def test_another_syncer_hears_what_state_the_learner_is_in():
    outbox = Outbox(0)
    outbox.record(records.StateChanged(0, State.STEPPING, 1.0))
    until(lambda: outbox._records.end == 1)
    drain(outbox, 1)
    [sent] = drain(outbox, 1)
    assert [r.state_changed.state for r in sent.records.records] == ["stepping"]
    assert sent.records.first == 2


def test_of_records_beyond_the_bound_the_oldest_are_given_up_and_missing_in_the_numbers():
    outbox = Outbox(0, max_records=10)
    for step in range(1, 31):
        outbox.record(records.StepDone(0, step, 0.0, 10, {}))
    until(lambda: outbox._records.end == 30)
    [sent] = drain(outbox, 1)
    assert sent.records.first == 20
    assert [r.step_done.step for r in sent.records.records] == list(range(21, 31))


def test_a_connection_has_no_records_until_a_syncer_has_let_the_learner_in():
    """What it was given would be lost if it comes to nothing, as while a syncer starts."""
    outbox = Outbox(0)
    outbox.record(records.StepDone(0, 1, 0.0, 10, {}))
    until(lambda: outbox._records.end == 1)
    refused = outbox.messages(outbox.connected())
    outbox.send(report(0, 1, 1))
    assert pb.FromLearner.FromString(next(refused)).WhichOneof("kind") == "event"
    [*_, sent] = drain(outbox, 2)
    assert [r.step_done.step for r in sent.records.records] == [1]


def test_an_older_connection_takes_nothing_once_there_is_a_newer_one():
    outbox = Outbox(0)
    old = outbox.messages(outbox.connected())
    new = outbox.messages(outbox.connected())
    outbox.send(events.LearnerLost(0, 1, "bye"))
    assert list(old) == []
    assert pb.FromLearner.FromString(next(new)).event.learner_lost.reason == "bye"


def test_a_learner_that_does_not_read_costs_a_bounded_number_of_messages():
    session = Session("name", 0, 1, Downlink(NewestFragments()))
    for n in range(3 * MAX_WAITING):
        session.say(from_syncer(events.NotMember(n)))
    for step in range(100):
        session.say(from_syncer(events.ClockSet(step)), replaces=True)
    session.close("over")
    messages = [pb.ToLearner.FromString(m) for m in session.messages()]
    assert len(messages) == MAX_WAITING
    assert messages[-1].event.clock_set.step == 99


def test_a_learner_may_send_what_it_was_asked_for_and_once_for_each_time_that_it_was():
    session = Session("name", 0, 1, Downlink(NewestFragments()))
    assert not session.expects(RoundId(4, 1), 0)
    for _ in range(2):
        session.deliver(asked(1, step=4))
        session.deliver(asked(0, step=6))
        assert not session.expects(RoundId(8, 1), 0)
        assert session.expects(RoundId(4, 1), 0)
        assert not session.expects(RoundId(4, 1), 0)
    for step in (12, 18, 24):
        session.deliver(asked(0, step=step))
    assert session.expects(RoundId(12, 0), 0)  # as one that is late, which a later round may take
    assert session.expects(RoundId(24, 0), 0)
    assert not session.expects(RoundId(18, 0), 0)  # offers come in the order of the rounds


class Context:
    """Of a call that goes on until it is cancelled."""

    cancelled = False

    def __init__(self):
        self.context = self

    def invocation_metadata(self):
        return ()

    def cancel(self):
        self.cancelled = True


def test_the_calls_of_a_session_end_with_it_and_none_begins_after():
    session, under_way, over = Session("name", 0, 1, Downlink(NewestFragments())), Context(), Context()
    with session.call("offers", over):
        pass
    with session.call("offers", under_way):
        session.close("gone")
    assert under_way.cancelled and not over.cancelled
    with (
        pytest.raises(Refused, match="the session is over"),
        session.call("offers", Context()),
    ):
        pytest.fail("it began")
