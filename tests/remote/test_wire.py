"""A real server and real clients on the loopback: joins, fragments, refusals, broken connections."""

import dataclasses
import pathlib
import socket
import subprocess
import threading

import grpc
import numpy as np
import pytest

from ddiloco.config import ConfigError
from ddiloco.launch.ports import reserved_port
from ddiloco.observe import records
from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.remote.wire import agreement as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.event_messages import up_header
from ddiloco.remote.wire.payload import chunks, payload_bytes
from ddiloco.remote.wire.security import Security, check_reach
from ddiloco.roles.exchange import Leave, Told
from ddiloco.schema import events_pb2
from ddiloco.settings.remote import RemoteConfig
from experiments.front.credentials import load_security
from tests.remote.ends import (
    CONFIG,
    PATIENCE,
    TERMS,
    LearnerEnd,
    SyncerEnd,
    arrays,
    asked,
    ended,
    error_of,
    joined,
    report,
    until,
    update,
    welcome,
)

ROOT = pathlib.Path(__file__).parents[2]


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def said(**kind):
    return pb.FromLearner(**kind).SerializeToString()


def ask(learner, link, fragment, step=4):
    """Has the learner asked for a fragment; gives the learner, which knows it now."""
    link.deliver(asked(fragment, step))
    learner.next(events.OfferAsked)
    return learner


def send_by_hand(learner, messages, timeout=PATIENCE):
    """Sends an offer's messages as the learner would; its answer."""
    until(lambda: learner.client._connection is not None, "the connection")
    [channel] = learner.client._connection._channels
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
        assert self.free.wait(PATIENCE)
        return arrays(0, 1)[0]


def secret(path, text):
    """A file that only its owner can read; its path as a flag has it."""
    path.touch(mode=0o600)
    path.write_text(text)
    return str(path)


@pytest.fixture
def address():
    """One that stays free while no syncer listens there."""
    with reserved_port() as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
def ends():
    syncer = SyncerEnd()
    with ended(syncer, learner := LearnerEnd(syncer.address)):
        yield syncer, learner


def test_a_welcome_an_update_and_a_contribution_arrive_bit_for_bit(ends):
    syncer, learner = ends
    link = joined(syncer, learner)
    link.deliver(welcome(100, step=6, version=2))
    delivery = learner.next(events.Welcomed)
    assert delivery.event == events.Welcomed(100, 6, (2, 2), (6, 6), lineages=(0, 0))
    assert_same(delivery.fragments[1], arrays(1, 2))
    link.deliver(update(1, 3, step=9))
    delivery = learner.next(events.UpdateArrived)
    assert delivery.event == events.UpdateArrived(1, 3, 9)
    assert_same(delivery.fragments[0], arrays(1, 3))
    contribution = ask(learner, link, 1).offer(1, 5)
    offered, sent = syncer.taken()
    assert offered == contribution
    assert_same(sent, arrays(1, 5))


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
    for event in (events.ClockSet(7), asked_for, events.NotMember(100), events.Rejected(100, "a newer one")):
        link.deliver(Told(event))
        assert learner.next(Told).event == event
    link.deliver(Leave())
    learner.next(Leave)


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
        never.wait(PATIENCE)  # the bytes do not come

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
        until(lambda: not link._asked, "the header to be read")
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


@pytest.mark.parametrize("timeout", [None, 10 * PATIENCE], ids=["none", "too late"])
def test_an_offer_must_have_a_deadline_since_it_holds_memory(ends, timeout):
    syncer, learner = ends
    ask(learner, joined(syncer, learner), 1)
    with pytest.raises(grpc.RpcError) as raised:
        send_by_hand(learner, iter([headed(1), *chunks(arrays(1, 5))]), timeout)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert syncer.drops() == ["wire: offer without a deadline"]
    assert syncer.offers.empty()


def test_offers_behind_one_that_takes_long_are_not_sent_once_an_update_makes_them_worthless(ends):
    syncer, learner = ends
    link = joined(syncer, learner)
    held = Held()
    ask(learner, link, 0).offer(0, 1, given=(held, *arrays(0, 1)[1:]))
    assert held.reached.wait(PATIENCE)
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
    assert held.reached.wait(PATIENCE)
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
        never.wait(PATIENCE)

    sending = threading.Thread(target=lambda: error_of(send_by_hand, learner, messages()))
    sending.start()
    assert begun.wait(PATIENCE)
    until(lambda: not link._asked, "the header to be read")
    learner.client._control.cancel()
    heard = {type(event): event for event in (syncer.heard.get(timeout=PATIENCE) for _ in range(2))}
    never.set()
    sending.join(PATIENCE)
    assert heard[events.LearnerLost].incarnation == 100
    assert heard[events.OfferFailed].round == RoundId(4, 1)


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
            assert learner.client.outbox.coalesced >= 1
            assert (0, 100) in again.links


def test_records_of_the_time_without_a_syncer_arrive_when_it_is_back(address):
    syncer = SyncerEnd(address=address)
    with ended(learner := LearnerEnd(syncer.address)):
        joined(syncer, learner)
        syncer.die()
        for step in range(1, 301):
            learner.client.outbox.record(records.StepDone(0, step, float(step), 10, {"loss": 1.0}))
        with ended(again := SyncerEnd(address=address)):
            until(lambda: again.server.intake.tokens == 3000)
            steps = [r.step for r in again.records if isinstance(r, records.StepDone)]
            assert steps == list(range(1, 301))


def test_a_goodbye_ends_the_session_after_the_last_record(ends):
    syncer, learner = ends
    joined(syncer, learner)
    learner.client.outbox.record(records.StepDone(0, 1, 1.0, 10, {"loss": 1.0}))
    assert learner.client.finish(PATIENCE)
    assert syncer.next(events.LearnerLost).reason == "it left"
    assert syncer.server.intake.tokens == 10


def test_a_new_process_hears_of_the_newest_incarnation(ends):
    syncer, learner = ends
    joined(syncer, learner, 500)
    learner.client.finish(0.0)
    assert syncer.next(events.LearnerLost).incarnation == 500
    with ended(newer := LearnerEnd(syncer.address, process=200)):
        assert newer.client.accepted.wait(PATIENCE)
        assert newer.client.newest_incarnation == 500


def test_a_process_that_connects_again_before_its_last_connection_is_known_to_be_lost_is_let_in(ends):
    syncer, learner = ends
    joined(syncer, learner)
    assert learner.client.accepted.wait(PATIENCE)
    with ended(again := LearnerEnd.__new__(LearnerEnd)):
        again.client = learner.client.__class__(
            syncer.address, 0, 100, TERMS, Security(), CONFIG, lambda line: None
        )
        again.client._session = learner.client._session  # as the same process knows it
        again.client.start()
        assert again.client.accepted.wait(PATIENCE)
        lost = syncer.next(events.LearnerLost)
        assert (lost.incarnation, lost.reason) == (100, "connected anew")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"terms": dataclasses.replace(TERMS, fingerprint="other")}, "the layouts' fingerprints differ"),
        ({"terms": dataclasses.replace(TERMS, rules="other")}, "the learner's settings are not the syncer's"),
        ({"learner": 2}, "learner 2 is none of the 2 of this run"),
        ({"security": Security("a wrong token here")}, "the syncer asks for another join token"),
        ({"security": Security()}, "the syncer asks for another join token"),
    ],
    ids=["fingerprint", "rules", "number", "wrong token", "no token"],
)
def test_who_does_not_fit_is_refused_in_one_line_and_tries_no_more(changes, told):
    security = Security("the token of this run")
    with ended(syncer := SyncerEnd(security=security)):
        learner = LearnerEnd(syncer.address, **{"security": security, **changes})
        assert learner.client.accepted.wait(PATIENCE)
        assert told in learner.client.refusal
        assert "\n" not in learner.client.refusal
        learner.next(Leave)
        assert syncer.heard.empty()
        assert len(syncer.drops()) == 1


def test_what_is_said_before_the_syncer_hears_waits_with_the_learner_and_only_the_newest_report():
    syncer = SyncerEnd(opened=False)
    with ended(syncer, learner := LearnerEnd(syncer.address)):
        assert learner.client.accepted.wait(PATIENCE)
        for step in range(1, 2001):
            learner.send(report(0, 100, step))
        assert syncer.heard.empty()
        syncer.server.open()
        until(lambda: syncer.next(events.StepReported).report.step == 2000, "the newest report")
        assert syncer.heard.empty()
        assert learner.client.outbox.coalesced > 1000


def test_an_incarnation_that_would_keep_out_every_later_process_is_refused(ends):
    syncer, learner = ends
    learner.send(events.LearnerJoined(0, 1 << 53))
    until(lambda: syncer.drops(), "the drop")
    assert syncer.drops()[0] == "wire: incarnation beyond belief"
    assert syncer.heard.empty()


def test_another_version_of_the_wire_is_refused(ends):
    syncer, _ = ends
    hello = pb.Hello(version=wire.VERSION + 1, fingerprint="layout", rules="rules")
    with pytest.raises(grpc.RpcError) as raised:
        next(control(syncer, said(hello=hello)))
    assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    own, other = wire.VERSION, wire.VERSION + 1
    assert raised.value.details() == f"the syncer speaks version {own} of the wire, the learner {other}"


def control(syncer, *messages):
    channel = grpc.insecure_channel(syncer.address, wire.options(20.0))
    return channel.stream_stream(wire.CONTROL)(iter(messages))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([b"\xff\xff\xff"], "malformed message"),
        ([said(goodbye=pb.Goodbye())], "unexpected message"),
        ([], "unexpected message"),
        (["hello", b"\x01"], "malformed message"),
        (
            ["hello", said(event=events_pb2.Event(learner_joined={"incarnation": 1 << 60}))],
            "number too large",
        ),
        (
            ["hello", said(event=events_pb2.Event(learner_ready={"versions": [1]}))],
            "another number of fragments",
        ),
    ],
    ids=["garbage", "no hello", "nothing", "later garbage", "number", "fragments"],
)
def test_what_cannot_be_read_ends_the_connection_and_is_counted(ends, messages, reason):
    syncer, learner = ends
    hello = pb.Hello(version=wire.VERSION, fingerprint="layout", rules="rules", learner=1, process=9)
    messages = [said(hello=hello) if message == "hello" else message for message in messages]
    with pytest.raises(grpc.RpcError) as raised:
        list(control(syncer, *messages))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    until(lambda: syncer.drops() == [f"wire: {reason}"])
    ask(learner, joined(syncer, learner), 0).offer(0, 3)  # the others notice nothing
    assert syncer.taken()[0].fragment == 0


def test_a_message_beyond_the_bound_is_refused_by_the_transport(ends):
    syncer, _ = ends
    with pytest.raises(grpc.RpcError) as raised:
        channel = grpc.insecure_channel(syncer.address)
        list(channel.stream_stream(wire.CONTROL)(iter([bytes(2 * wire.MAX_MESSAGE_BYTES)])))
    assert raised.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)


def test_calls_outside_a_session_are_refused(ends):
    syncer, _ = ends
    channel = grpc.insecure_channel(syncer.address, wire.options(20.0))
    for call in (
        lambda: list(channel.unary_stream(wire.UPDATES)(b"")),
        lambda: channel.stream_unary(wire.OFFERS)(iter([b"x"]), timeout=PATIENCE),
    ):
        with pytest.raises(grpc.RpcError) as raised:
            call()
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_syncer_that_sends_what_cannot_be_read_is_left_and_tried_again():
    other = dataclasses.replace(TERMS, down=[TERMS.down[1], TERMS.down[0]])
    syncer = SyncerEnd()
    with ended(syncer, learner := LearnerEnd(syncer.address, terms=other)):
        joined(syncer, learner).deliver(welcome(100))
        until(lambda: learner.client.malformed and learner.client.connections > 1)
        assert learner.inbox.empty()


def test_tls_lets_in_who_has_a_certificate_of_the_same_authority_and_nobody_else(tmp_path):
    for name in ("ours", "others"):
        command = [ROOT / "scripts/make_certs.sh", tmp_path / name, "localhost"]
        subprocess.run(command, check=True, capture_output=True)
    syncer = SyncerEnd(security=load_security(None, str(tmp_path / "ours/syncer")))
    ours = load_security(None, str(tmp_path / "ours/learner"))
    with ended(syncer, learner := LearnerEnd(syncer.address, security=ours)):
        ask(learner, joined(syncer, learner), 1).offer(1, 5)
        assert_same(syncer.taken()[1], arrays(1, 5))
        stranger = load_security(None, str(tmp_path / "others/learner"))
        for security in (stranger, Security()):
            with ended(outside := LearnerEnd(syncer.address, 1, security=security)):
                with pytest.raises(grpc.RpcError):
                    channel = security.channel(syncer.address, wire.options(20.0))
                    next(channel.stream_stream(wire.CONTROL)(iter([b""]), timeout=PATIENCE))
                assert outside.client.connections == 0


@pytest.mark.parametrize("address", ["0.0.0.0:7070", "[::]:7070", "10.1.2.3:7070", "example.org:7070"])
def test_listening_beyond_the_loopback_needs_a_token_or_tls(address):
    with pytest.raises(ConfigError, match=r"^listen: .*which needs --token_file or --tls$"):
        check_reach(address, Security())
    check_reach(address, Security(token="x" * 16))
    check_reach("127.0.0.1:7070", Security())
    check_reach("localhost:7070", Security())


def test_a_token_is_never_shown_and_a_short_one_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^token_file: .*at least 16 ASCII characters, or NUMBER TOKEN"):
        load_security(secret(tmp_path / "token", "short\n"), None)
    with pytest.raises(ConfigError, match=r"^tls: .*ca.pem: cannot be read"):
        load_security(None, str(tmp_path))
    assert "secret" not in repr(Security("secret secret secret"))


def test_an_address_that_is_taken_is_told(ends):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match=r"^listen: "):
        SyncerEnd(config=CONFIG, address=f"127.0.0.1:{taken.getsockname()[1]}")
