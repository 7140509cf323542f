"""Offers over a real wire: those that nobody asked for, that fail, that wait, and that come too late."""

import threading

import grpc
import pytest

from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.remote.learner.streams import _Offer
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire.event_messages import up_header
from ddiloco.remote.wire.payload import chunks, payload_bytes
from ddiloco.telemetry.throughput import UNMEASURED
from ddiloco.workers.transfer import Offer
from tests.remote.ends import (
    TERMS,
    TIMEOUT,
    arrays,
    ask,
    assert_same,
    error_of,
    joined,
    until,
    update,
)


def send_by_hand(learner, messages, timeout=TIMEOUT):
    """Sends an offer's messages as the learner would; its answer."""
    until(lambda: learner.client._connection is not None, "the connection")
    channel = learner.client._connection._channel
    send, metadata = channel.stream_unary(wire.OFFERS), learner.client._connection._metadata
    return send(messages, metadata=metadata, timeout=timeout)


def headed(fragment, step=4):
    """The header of an offer of all the fragment's bytes."""
    contribution = Contribution(0, 100, fragment, 0, step, 3, 30)
    size = payload_bytes(arrays(fragment, 5))
    return up_header(RoundId(step, fragment), contribution, size).SerializeToString()


class Held:
    """An array of the devices whose memory cannot be read before it is let go, or not at all."""

    def __init__(self, problem=None):
        self.reached, self.free, self._problem = threading.Event(), threading.Event(), problem

    def __array__(self, dtype=None, copy=None):
        self.reached.set()
        if self._problem is not None:
            raise self._problem
        assert self.free.wait(TIMEOUT)
        return arrays(0, 1)[0]


@pytest.mark.parametrize("wrong", ["never asked", "of another round", "a second time"])
def test_what_nobody_asked_for_is_refused_before_its_bytes_are_taken(ends, wrong):
    syncer, learner = ends
    link = joined(syncer, learner)
    if wrong == "of another round":
        ask(learner, link, 1, step=10)
    elif wrong == "a second time":
        ask(learner, link, 1).offer(1, 5)
        syncer.taken()
    never = threading.Event()

    def messages():
        yield headed(1)
        never.wait(TIMEOUT)  # the bytes do not come

    with pytest.raises(grpc.RpcError) as raised:
        send_by_hand(learner, messages())
    never.set()
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert syncer.drops() == ["wire: unawaited fragment"]
    assert syncer.offers.empty() and syncer.heard.empty()


def test_an_offer_of_another_shape_has_failed_before_it_travels_far_and_may_be_asked_for_again(ends):
    syncer, learner = ends
    link = joined(syncer, learner)
    ask(learner, link, 1).offer(1, 5, given=arrays(1, 5)[1:])
    assert syncer.next(events.OfferFailed) == events.OfferFailed(
        RoundId(4, 1), 0, 100, "fragment of another size"
    )
    assert syncer.drops() == ["wire: fragment of another size"]
    ask(learner, link, 1).offer(1, 6)
    assert_same(syncer.taken()[1], arrays(1, 6))  # the connection goes on


def test_an_offer_that_breaks_in_the_middle_has_failed_and_may_be_asked_for_again(ends):
    syncer, learner = ends
    link = joined(syncer, learner)
    ask(learner, link, 1)

    def messages():
        yield headed(1)
        yield next(iter(chunks(arrays(1, 5))))
        until(lambda: not any(link._asked.values()), "the header to be read")
        raise OSError("the rest is lost")

    with pytest.raises(grpc.RpcError):
        send_by_hand(learner, messages())
    failed = syncer.next(events.OfferFailed)
    assert (failed.round, failed.learner, failed.incarnation) == (RoundId(4, 1), 0, 100)
    assert failed.reason in ("the transfer broke", "fragment cut short")  # as gRPC tells it
    assert syncer.offers.empty()
    ask(learner, link, 1).offer(1, 6)
    assert_same(syncer.taken()[1], arrays(1, 6))


def test_of_an_offer_that_the_devices_fail_to_give_the_syncer_hears(ends):
    syncer, learner = ends
    link = joined(syncer, learner)
    ask(learner, link, 0).offer(0, 5, given=(Held(RuntimeError("no memory")), *arrays(0, 5)[1:]))
    failed = syncer.next(events.OfferFailed)
    assert failed == events.OfferFailed(RoundId(4, 0), 0, 100, "RuntimeError: no memory")
    ask(learner, link, 0).offer(0, 6)
    assert_same(syncer.taken()[1], arrays(0, 6))


def test_an_offer_that_takes_too_long_is_ended_since_it_holds_memory(ends, monkeypatch):
    syncer, learner = ends
    link = joined(syncer, learner)
    monkeypatch.setattr(link.down.throughput, "timeout", lambda timeout, size: 0.1)
    monkeypatch.setattr(link.down.throughput, "limit", lambda timeout, size: 0.2)
    ask(learner, link, 1)
    over = threading.Event()

    def never():
        yield headed(1)
        over.wait(TIMEOUT)

    with pytest.raises(grpc.RpcError):
        send_by_hand(learner, never(), timeout=None)
    over.set()
    assert syncer.next(events.OfferFailed).round.fragment == 1


def test_an_offer_may_have_a_later_deadline_than_the_syncer_would_give_it(ends):
    """A learner may have seen a slower link than this connection's."""
    syncer, learner = ends
    link = joined(syncer, learner)
    link.down.throughput.add(payload_bytes(arrays(1, 5)), 0.001)
    ask(learner, link, 1)
    send_by_hand(learner, iter([headed(1), *chunks(arrays(1, 5))]), timeout=100 * TIMEOUT)
    assert_same(syncer.taken()[1], arrays(1, 5))
    assert syncer.drops() == []


def test_a_learner_that_was_never_welcomed_does_not_break_off_what_its_link_needs_long_for(ends):
    """As after a resume: nothing has come yet by which the link is known."""
    syncer, learner = ends
    joined(syncer, learner)
    limits = []
    until(lambda: learner.client._connection is not None, "the connection")
    streams = learner.client._connection._streams
    offer = _Offer(RoundId(4, 0), Contribution(0, 100, 0, 0, 4, 3, 30), Offer(arrays(0, 5)))
    for _ in range(2):
        streams._send(lambda messages, metadata, timeout: limits.append(timeout), offer)
        learner.client.throughput.add(1 << 30, 0.001)
    assert limits == [UNMEASURED, pytest.approx(TERMS.offer_timeout)]


def test_offers_behind_one_that_takes_long_are_not_sent_once_an_update_makes_them_worthless(ends):
    syncer, learner = ends
    link = joined(syncer, learner)
    held = Held()
    ask(learner, link, 0).offer(0, 1, given=(held, *arrays(0, 1)[1:]))
    assert held.reached.wait(TIMEOUT)
    ask(learner, link, 1).offer(1, 5)  # waits behind the one under way
    link.deliver(update(1, 1))
    learner.next(events.UpdateArrived)
    held.free.set()
    assert_same(syncer.taken()[1], arrays(0, 1))
    ask(learner, link, 1, step=8).offer(1, 6, step=8, version=1)
    contribution, sent = syncer.taken()
    assert (contribution.step, contribution.version) == (8, 1)
    assert_same(sent, arrays(1, 6))
    assert syncer.drops() == []


def test_a_fragment_that_waits_is_sent_as_it_was_offered_last(ends):
    syncer, learner = ends
    link = joined(syncer, learner)
    held = Held()
    ask(learner, link, 0).offer(0, 1, given=(held, *arrays(0, 1)[1:]))
    assert held.reached.wait(TIMEOUT)
    for step in (4, 6):
        ask(learner, link, 1, step).offer(1, step, step=step)
    held.free.set()
    assert [syncer.taken()[0].step for _ in range(2)] == [4, 6]
    assert syncer.drops() == []


def test_a_lost_learner_is_told_to_the_core_and_what_it_was_sending_has_failed(ends):
    syncer, learner = ends
    link = joined(syncer, learner)
    ask(learner, link, 1)
    begun, never = threading.Event(), threading.Event()

    def messages():
        yield headed(1)
        yield next(iter(chunks(arrays(1, 5))))
        begun.set()
        never.wait(TIMEOUT)

    sending = threading.Thread(target=lambda: error_of(send_by_hand, learner, messages()))
    sending.start()
    assert begun.wait(TIMEOUT)
    until(lambda: not any(link._asked.values()), "the header to be read")
    learner.client._control.cancel()
    heard = {type(event): event for event in (syncer.heard.get(timeout=TIMEOUT) for _ in range(2))}
    never.set()
    sending.join(TIMEOUT)
    assert heard[events.LearnerLost].incarnation == 100
    assert heard[events.OfferFailed].round == RoundId(4, 1)
