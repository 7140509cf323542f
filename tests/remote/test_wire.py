"""A real server and real clients on the loopback: joins, fragments, broken connections."""

import concurrent.futures
import weakref

import pytest

from ddiloco.launch.ports import reserved_port
from ddiloco.protocol import events
from ddiloco.protocol.messages import RoundId
from ddiloco.remote.learner import streams
from ddiloco.remote.learner.client import ShardBook, SyncerClient
from ddiloco.remote.learner.streams import HostWire
from ddiloco.remote.wire import payload
from ddiloco.remote.wire.security import Security
from ddiloco.settings.remote import RemoteConfig
from ddiloco.telemetry import records
from ddiloco.workers.exchange import EventDelivery, Leave
from tests.remote.ends import (
    CONFIG,
    TERMS,
    TIMEOUT,
    LearnerEnd,
    SyncerEnd,
    arrays,
    ask,
    assert_same,
    ended,
    joined,
    report,
    until,
    update,
    welcome,
)


@pytest.fixture
def address():
    """One that stays free while no syncer listens there."""
    with reserved_port() as port:
        yield f"127.0.0.1:{port}"


def test_a_welcome_an_update_and_a_contribution_arrive_bit_for_bit(ends):
    syncer, learner = ends
    link = joined(syncer, learner)
    link.deliver(welcome(100, step=6, version=2))
    delivery = learner.next(events.Welcomed)
    assert delivery.event == events.Welcomed(100, 6, (2, 2), (6, 6), (0, 1), (0, 0))
    assert_same(delivery.fragments[1], arrays(1, 2))
    link.deliver(update(1, 3, step=9))
    delivery = learner.next(events.UpdateArrived)
    assert delivery.event == events.UpdateArrived(1, 3, 9)
    assert_same(delivery.fragments[0], arrays(1, 3))
    contribution = ask(learner, link, 1).offer(1, 5)
    offered, sent = syncer.taken()
    assert offered == contribution
    assert_same(sent, arrays(1, 5))


def test_a_version_is_held_by_nobody_who_waits_for_the_next(ends):
    syncer, learner = ends
    joined(syncer, learner).deliver(update(0, 1))
    held = weakref.ref(learner.next(events.UpdateArrived).fragments[0][0])
    until(lambda: held() is None, "its end")


def test_several_connections_carry_what_one_does():
    config = RemoteConfig(connections=3)
    syncer = SyncerEnd(config=config)
    with ended(syncer, learner := LearnerEnd(syncer.address, config=config)):
        link = joined(syncer, learner)
        link.deliver(welcome(100))
        assert_same(learner.next(events.Welcomed).fragments[0], arrays(0, 0))
        for p in (0, 1):
            ask(learner, link, p).offer(p, 4 + p)
        for contribution, sent in sorted((syncer.taken() for _ in range(2)), key=lambda o: o[0].fragment):
            assert_same(sent, arrays(contribution.fragment, 4 + contribution.fragment))
        for p in (0, 1):
            link.deliver(update(p, 1))
        assert {learner.next(events.UpdateArrived).event.fragment for _ in range(2)} == {0, 1}


def test_notices_and_the_word_to_leave_arrive(ends):
    syncer, learner = ends
    link = joined(syncer, learner)
    asked_for = events.OfferAsked(RoundId(4, 1), 3, 2)
    timing, replaced = events.TimingSet(12, 2, 0, 0.5, 1.0, "why"), events.Rejected(100, "a newer one")
    for event in (events.ClockSet(7), asked_for, timing, events.NotMember(100), replaced):
        link.deliver(EventDelivery(event))
        assert learner.next(EventDelivery).event == event
    link.deliver(Leave())
    learner.next(Leave)


def test_a_learner_finds_its_syncer_where_the_web_has_a_proxy(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    syncer = SyncerEnd()
    with ended(syncer, learner := LearnerEnd(syncer.address)):
        joined(syncer, learner)
        assert not learner.notes


def test_a_learner_connects_anew_and_says_again_where_it_stands(address):
    syncer = SyncerEnd(address=address)
    with ended(learner := LearnerEnd(syncer.address)):
        joined(syncer, learner)
        learner.send(report(0, 100, 3))
        syncer.next(events.StepReported)
        syncer.die()
        syncer.next(events.LearnerLost)
        learner.send(report(0, 100, 4))
        learner.send(report(0, 100, 5))  # steps go on meanwhile
        with ended(again := SyncerEnd(address=address)):
            assert again.next(events.StepReported).report.step == 5
            assert (0, 100) in again.links


@pytest.mark.parametrize(
    "error", [MemoryError("2 GiB"), RuntimeError("RESOURCE_EXHAUSTED"), ValueError("none")]
)
def test_an_update_that_memory_refuses_costs_the_connection_and_no_later_update(error, ends, monkeypatch):
    syncer, learner = ends
    link, fail = joined(syncer, learner), [error]

    def receive(form, size, stream):
        if fail:
            raise fail.pop()
        return payload.receive(form, size, stream)

    monkeypatch.setattr(streams, "receive", receive)
    link.deliver(update(1, 1))
    until(lambda: syncer.links[0, 100] is not link, "another connection")
    syncer.links[0, 100].begun(100)
    syncer.links[0, 100].deliver(update(1, 2))
    assert_same(learner.next(events.UpdateArrived).fragments[0], arrays(1, 2))


@pytest.mark.parametrize(("metrics", "steps"), [(160, 300), (1100, 1)])
def test_records_of_many_metrics_arrive_in_messages_that_may_be(metrics, steps, address):
    syncer = SyncerEnd(address=address)
    with ended(learner := LearnerEnd(syncer.address)):
        joined(syncer, learner)
        syncer.die()
        until(lambda: learner.client._connection is None)
        told = {"loss": 1.0, **{f"metric_{n}": float(n) for n in range(metrics)}}
        for step in range(1, steps + 1):
            learner.client.outbox.record(records.StepDone(0, step, float(step), 10, told))
        with ended(again := SyncerEnd(address=address)):
            until(lambda: len(steps_in(again.records)) == steps)
            [found, *_] = [r for r in again.records if isinstance(r, records.StepDone)]
            assert found.metrics == dict([*told.items()][:1024])
            assert learner.client.connections <= 2


def steps_in(taken):
    return [r.step for r in taken if isinstance(r, records.StepDone)]


def test_a_goodbye_ends_the_session_after_the_last_record(ends):
    syncer, learner = ends
    joined(syncer, learner)
    learner.client.outbox.record(records.StepDone(0, 1, 1.0, 10, {"loss": 1.0}))
    assert learner.client.finish(TIMEOUT)
    assert syncer.next(events.LearnerLost).reason == "it left"
    assert steps_in(syncer.records) == [1]


def test_a_process_that_connects_again_before_its_last_connection_is_known_to_be_lost_is_let_in(ends):
    syncer, learner = ends
    joined(syncer, learner)
    assert learner.client.accepted.wait(TIMEOUT)
    with ended(again := LearnerEnd.__new__(LearnerEnd)):
        own = HostWire(TERMS, Security(), CONFIG)
        again.client = SyncerClient(ShardBook(syncer.address, 0, 100), 0, own)
        again.client._session = learner.client._session  # as the same process knows it
        again.client.start()
        assert again.client.accepted.wait(TIMEOUT)
        lost = syncer.next(events.LearnerLost)
        assert (lost.incarnation, lost.reason) == (100, "connected again")


def test_a_learner_that_is_away_as_the_run_ends_hears_of_it_when_it_is_back(ends):
    syncer, learner = ends
    joined(syncer, learner)
    [session] = syncer.server._all_sessions()
    syncer.server._end(session, "connection lost")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        all_came = pool.submit(syncer.server.stop, TIMEOUT, reconnect_timeout=TIMEOUT)
        learner.next(Leave)
        assert learner.client.finish(TIMEOUT) and all_came.result(TIMEOUT)
    assert not syncer.server.away


def test_a_syncer_that_another_follows_tells_learners_nothing(address):
    syncer = SyncerEnd(address=address)
    with ended(learner := LearnerEnd(syncer.address)):
        joined(syncer, learner)
        syncer.server.close()
        with ended(again := SyncerEnd(address=address)):
            again.next(events.LearnerJoined)
            assert learner.inbox.empty()
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                stopped = pool.submit(again.server.stop, TIMEOUT)
                learner.next(Leave)
                learner.client.finish(TIMEOUT)
                assert stopped.result(TIMEOUT)


def test_a_run_that_ends_waits_for_no_learner_that_still_compiles(ends):
    syncer, learner = ends
    assert learner.client.accepted.wait(TIMEOUT)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert not pool.submit(syncer.server.stop, 2 * TIMEOUT).result(TIMEOUT)
    learner.next(Leave)
