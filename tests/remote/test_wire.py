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
from ddiloco.remote.wire import agreement as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.payload import payload_bytes
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
    assert delivery.event == events.Welcomed(100, 6, (2, 2), (6, 6))
    assert_same(delivery.fragments[1], arrays(1, 2))
    link.deliver(update(1, 3, step=9))
    delivery = learner.next(events.UpdateArrived)
    assert delivery.event == events.UpdateArrived(1, 3, 9)
    assert_same(delivery.fragments[0], arrays(1, 3))
    contribution = learner.publish(1, 5)
    pulled, sent = link.pull(1)
    assert pulled == contribution
    assert_same(sent, arrays(1, 5))


def test_several_connections_carry_what_one_does():
    config = RemoteConfig(connections=3)
    syncer = SyncerEnd(config=config)
    with ended(syncer, learner := LearnerEnd(syncer.address, config=config)):
        link = joined(syncer, learner)
        link.deliver(welcome(100))
        assert_same(learner.next(events.Welcomed).fragments[0], arrays(0, 0))
        for p in (0, 1):
            learner.publish(p, 4 + p)
        for p in (0, 1):
            assert_same(link.pull(p)[1], arrays(p, 4 + p))
            link.deliver(update(p, 1))
        assert {learner.next(events.UpdateArrived).event.fragment for _ in range(2)} == {0, 1}


def test_notices_and_the_word_to_leave_arrive(ends):
    syncer, learner = ends
    link = joined(syncer, learner)
    for event in (events.ClockSet(7), events.NotMember(100), events.Rejected(100, "a newer one")):
        link.deliver(Told(event))
        assert learner.next(Told).event == event
    link.deliver(Leave())
    learner.next(Leave)


def test_what_is_not_published_is_told_at_once(ends):
    syncer, learner = ends
    assert joined(syncer, learner).pull(0) is None


def test_a_snapshot_of_another_shape_is_refused_before_it_travels_far(ends):
    syncer, learner = ends
    link = joined(syncer, learner)
    learner.publish(1, 5)
    contribution, snapshot = learner.shelf.pull(1)
    learner.shelf.put(contribution, dataclasses.replace(snapshot, arrays=snapshot.arrays[1:]))
    with pytest.raises(ConnectionError, match="fragment of another size"):
        link.pull(1)
    until(lambda: syncer.drops() == ["wire: fragment of another size"])
    learner.publish(1, 6)
    assert_same(link.pull(1)[1], arrays(1, 6))  # the connection goes on


def test_a_lost_learner_is_told_to_the_core_and_its_pulls_fail():
    syncer, blocked = SyncerEnd(), threading.Event()
    learner = LearnerEnd(syncer.address)
    learner.shelf.pull = lambda fragment: blocked.wait(PATIENCE) and None
    with ended(syncer, learner):
        link = joined(syncer, learner)
        failed = []
        asked = threading.Thread(target=lambda: failed.append(error_of(link.pull, 0)))
        asked.start()
        until(lambda: link._pulls)
        assert learner.client.accepted.wait(PATIENCE)  # the syncer hears of it before
        learner.client._control.cancel()
        assert syncer.next(events.LearnerLost).incarnation == 100
        asked.join(PATIENCE)
        assert [type(error) for error in failed] == [ConnectionError]
        blocked.set()


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


def test_a_new_process_hears_of_the_newest_incarnation_and_an_old_connection_of_its_own_is_closed(ends):
    syncer, learner = ends
    joined(syncer, learner, 500)
    with ended(newer := LearnerEnd(syncer.address, process=200)):
        assert newer.client.accepted.wait(PATIENCE)
        assert newer.client.newest_incarnation == 500
    with ended(double := LearnerEnd(syncer.address)):
        assert double.client.accepted.wait(PATIENCE)
        lost = syncer.next(events.LearnerLost)
        assert (lost.incarnation, lost.reason) == (500, "connected anew")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"terms": dataclasses.replace(TERMS, fingerprint="other")}, "the layouts' fingerprints differ"),
        ({"terms": dataclasses.replace(TERMS, rules="other")}, "config.sync, train.steps or outer.codec"),
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
    assert raised.value.details() == "the syncer speaks version 4 of the wire, the learner 5"


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
    link = joined(syncer, learner)  # the others notice nothing
    assert link.pull(0) is None


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
        lambda: channel.stream_unary(wire.PULLED)(iter([b"x"])),
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
        link = joined(syncer, learner)
        learner.publish(1, 5)
        assert payload_bytes(link.pull(1)[1]) == payload_bytes(arrays(1, 5))
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
    (tmp_path / "token").write_text("short\n")
    with pytest.raises(ConfigError, match=r"^token_file: .*at least 16 ASCII characters$"):
        load_security(str(tmp_path / "token"), None)
    with pytest.raises(ConfigError, match=r"^tls: .*ca.pem: cannot be read"):
        load_security(None, str(tmp_path))
    assert "secret" not in repr(Security("secret secret secret"))


def test_an_address_that_is_taken_is_told(ends):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match=r"^listen: "):
        SyncerEnd(config=CONFIG, address=f"127.0.0.1:{taken.getsockname()[1]}")
