"""Who and what a syncer does not take: learners that do not fit, bytes that cannot be read, no token."""

import dataclasses

import grpc
import pytest

from ddiloco.config import ConfigError
from ddiloco.protocol import events
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire.security import Security, check_reach
from ddiloco.schema import events_pb2
from ddiloco.workers.exchange import Leave
from experiments.cli.credentials import load_security
from tests.remote.ends import (
    TERMS,
    TIMEOUT,
    LearnerEnd,
    SyncerEnd,
    arrays,
    ask,
    assert_same,
    certificates,
    ended,
    greeting,
    joined,
    said,
    until,
    welcome,
)


def secret(path, text):
    """A file that only its owner can read; its path as a flag has it."""
    path.touch(mode=0o600)
    path.write_text(text)
    return str(path)


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
        assert learner.client.accepted.wait(TIMEOUT)
        assert told in learner.client.refusal
        assert "\n" not in learner.client.refusal
        learner.next(Leave)
        assert syncer.heard.empty()
        assert len(syncer.drops()) == 1


def test_an_incarnation_that_would_keep_out_every_later_process_is_refused(ends):
    syncer, learner = ends
    learner.send(events.LearnerJoined(0, 1 << 53))
    until(lambda: syncer.drops(), "the drop")
    assert syncer.drops()[0] == "wire: incarnation out of range"
    assert syncer.heard.empty()


def test_another_version_of_the_wire_is_refused(ends):
    syncer, _ = ends
    with pytest.raises(grpc.RpcError) as raised:
        next(control(syncer, greeting(version=wire.VERSION + 1)))
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
        ([said(goodbye=True)], "unexpected message"),
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
    hello = greeting(learner=1, process=9)
    messages = [hello if message == "hello" else message for message in messages]
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
        lambda: channel.stream_unary(wire.OFFERS)(iter([b"x"]), timeout=TIMEOUT),
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
        certificates(tmp_path / name)
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
                    next(channel.stream_stream(wire.CONTROL)(iter([b""]), timeout=TIMEOUT))
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
