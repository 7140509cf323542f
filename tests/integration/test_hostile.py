"""Peers that mean no good, with and without credentials, beside honest learners whose work goes on."""

import socket
import threading
import time

import grpc

from ddiloco.protocol import events
from ddiloco.protocol.messages import RoundId
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.event_messages import from_learner
from ddiloco.remote.wire.security import Security
from experiments.studies.chaos.unauthorized_client import UnauthorizedClient
from tests.integration.hand import LIMIT, SECURITY, assert_counted_once, assert_nothing_twice
from tests.remote.ends import TIMEOUT, greeting, said
from tests.remote.test_identity import silent_calls

CHANGES = (
    "--config.train.min_step_seconds=(0.05, 0.05, 0.05)",
    "--config.sync.num_learners=3",
    "--config.sync.silence_timeout=20",
)
UNREADABLE = b"\xff\xff\xff"  # by which a call ends
ASLEEP = pb.Record(state_changed=pb.StateChanged(state="asleep"))


def say(address, messages):
    """Says this over a connection with the token; the code with which the syncer ends the call."""
    never = threading.Event()

    def spoken():
        yield from messages
        never.wait(LIMIT)

    with grpc.insecure_channel(address) as channel:
        try:
            list(channel.stream_stream(wire.CONTROL)(spoken(), metadata=SECURITY.metadata, timeout=LIMIT))
        except grpc.RpcError as error:
            return error.code()
        finally:
            never.set()


def event(told):
    return from_learner(told).SerializeToString()


def test_hostile_peers_end_nothing_and_keep_nobody_from_being_merged(job):
    syncer = job.syncer(affliction="files:256")
    honest = [job.learner(m) for m in (0, 1)]
    alive = [syncer, *honest]
    job.wait_for(lambda: job.merges(0) and job.merges(1), "merges of both", alive)

    def merged_on():
        since = time.time()
        job.wait_for(lambda: job.merges(0, since) and job.merges(1, since), "merges of both", alive)

    host, port = job.address.split(":")
    idle = []
    for _ in range(300):  # that say nothing; the system may refuse some, or the syncer end them
        idle.append(socket.create_connection((host, int(port)), TIMEOUT))
    merged_on()
    for connection in idle:
        connection.close()
    UnauthorizedClient(job.address, print).noise()
    for security in (Security(), SECURITY):
        channels, never = silent_calls(job.address, security, (wire.CONTROL, wire.UPDATES, wire.PEERS), 100)
        merged_on()
        never.set()
        for channel in channels:
            channel.close()
    agreed = job.terms()
    hello = greeting(agreed, learner=2, process=7)
    for process in (1, 1 << 50):  # one that lives, and speaks
        assert say(job.address, [greeting(agreed, learner=1, process=process)]) is grpc.StatusCode.UNAVAILABLE
    codes = [
        say(job.address, [hello, *messages, UNREADABLE])
        for messages in (
            [said(checkpoint_written=pb.CheckpointWritten(snapshot=3, problem="\x1b[2J" * 99))],
            [event(events.OfferFailed(RoundId(1, 0), 0, 7, "\x1b[2J" * 99))],
            [event(events.LearnerJoined(0, n)) for n in range(7, 20_007)],
        )
    ]
    codes += [
        say(job.address, [hello, message])
        for message in (
            event(events.LearnerJoined(0, 1 << 60)),
            event(events.LearnerReady(0, 1, 1, (1,))),
            said(records=pb.Records(records=[ASLEEP])),
        )
    ]
    assert set(codes) == {grpc.StatusCode.INVALID_ARGUMENT}
    beyond_the_bound = say(job.address, [hello, bytes(2 * wire.MAX_MESSAGE_BYTES)])
    assert beyond_the_bound in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)
    merged_on()
    assert job.end(syncer)[0] == 143
    assert [job.left(process)[0] for process in honest] == [0, 0]
    assert_nothing_twice(job)
    assert_counted_once(job, (0, 1))
    summary = job.summary()
    assert summary["failures"] == []
    drops, alarms = summary["drops"], summary["alarms"]
    assert drops["wire: wrong token"] >= 100 and drops["wire: number taken"] == 2
    assert drops["wire: too many incarnations"] == 1
    told = ("malformed message", "number too large", "another number of fragments", "malformed record")
    assert not {f"wire: {reason}" for reason in told} - drops.keys()
    assert "a call from 127.0.0.1 without the join token was refused" in alarms
    assert "a second process, of 127.0.0.1, asked for the place of learner 1: refused" in alarms
    assert not [alarm for alarm in alarms if "merges wait" in alarm]
