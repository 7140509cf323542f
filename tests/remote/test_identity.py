"""Who speaks for a learner: second processes, own tokens and certificates, and callers without any."""

import asyncio
import contextlib
import dataclasses
import queue
import threading

import grpc
import pytest

from ddiloco.protocol import events
from ddiloco.remote.syncer import session as sessions
from ddiloco.remote.syncer.admission import FURTHEST
from ddiloco.remote.syncer.downlink import Downlink, NewestFragments
from ddiloco.remote.syncer.listening import Handshakes
from ddiloco.remote.syncer.session import MAX_CALLS, Session
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.calls import Refused
from ddiloco.remote.wire.security import Security
from ddiloco.telemetry import records
from experiments.cli.credentials import load_security
from tests.long import times
from tests.remote.donors import Steps, ask, assert_same, state
from tests.remote.ends import (
    TERMS,
    TIMEOUT,
    LearnerEnd,
    SyncerEnd,
    asked,
    certificates,
    ended,
    greeting,
    joined,
    report,
    until,
)

HELLOS = times(5, 30)
UNREAD = [("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0)]  # no room for any answer
ALL = Security("the token that all share")
OWN = Security(tokens={0: "the token of learner 0", 1: "the token of learner 1"})


def hello(syncer, security=ALL, timeout=TIMEOUT, **fields):
    """What the syncer answers to a hello by hand: its first message, or the error."""
    never = threading.Event()

    def messages():
        yield greeting(**fields)
        never.wait(TIMEOUT)

    channel = security.channel(syncer.address, wire.options(20.0))
    call = channel.stream_stream(wire.CONTROL)(messages(), metadata=security.metadata, timeout=timeout)
    try:
        return pb.ToLearner.FromString(next(call)).accepted
    except grpc.RpcError as error:
        return error
    finally:
        never.set()
        call.cancel()
        channel.close()


def works(syncer, learner, number=0, step=4):
    """Whether what the learner says and sends still arrives, under its first incarnation."""
    learner.send(report(number, 100, step))
    assert syncer.next(events.StepReported).report.step == step
    syncer.links[number, 100].deliver(asked(0, step))
    learner.next(events.OfferAsked)
    learner.offer(0, 5, step=step)
    assert syncer.taken()[0].step == step


@pytest.mark.parametrize("claims", [{}, {"process": 101}, {"session": "no"}])
def test_a_hello_under_the_number_of_one_that_speaks_is_refused_and_disturbs_it_not_once(claims):
    syncer = SyncerEnd(security=ALL)
    with ended(syncer, learner := LearnerEnd(syncer.address, security=ALL)):
        joined(syncer, learner)
        for _ in range(HELLOS):
            refused = hello(syncer, **claims)
            assert refused.code() is grpc.StatusCode.UNAVAILABLE, "it may try again"
            assert "learner 0 is connected from 127.0.0.1, and speaks" in refused.details()
        works(syncer, learner)
        assert learner.client.connections == 1
        assert syncer.drops() == ["wire: number taken"] * HELLOS
        assert set(syncer.alarms()) == {
            "a second process, of 127.0.0.1, asked for the place of learner 0: refused"
        }


def test_a_second_process_takes_the_place_of_one_that_is_silent_and_that_one_may_not_come_back():
    brief = dataclasses.replace(TERMS, silence_timeout=0.2)
    syncer = SyncerEnd(security=ALL, terms=brief)
    with ended(syncer, old := LearnerEnd(syncer.address, security=ALL, terms=brief)):
        joined(syncer, old)
        with ended(new := LearnerEnd(syncer.address, process=50, security=ALL, terms=brief)):
            until(new.client.accepted.is_set, "the new process's turn")
            assert syncer.next(events.LearnerLost) == events.LearnerLost(0, 100, "replaced")
            until(lambda: old.client.refusal is not None, "the refusal")
            assert old.client.refusal == "another process of learner 0 has taken its place"
            old.client.outbox.record(records.StepDone(0, 1, 1.0, 30, {}))
            leaving = threading.Thread(target=old.client.finish, args=(1e6,), daemon=True)
            leaving.start()
            until(lambda: not leaving.is_alive(), "its end, though nobody confirms its records")


def test_a_process_whose_place_was_taken_while_it_was_lost_may_not_come_back_either():
    syncer = SyncerEnd(security=ALL)
    with ended(syncer, old := LearnerEnd(syncer.address, security=ALL)):
        joined(syncer, old)
        old.client.finish(0.0)
        syncer.next(events.LearnerLost)
        with ended(new := LearnerEnd(syncer.address, process=101, security=ALL)):
            assert new.client.accepted.wait(TIMEOUT)
            assert hello(syncer, process=100).code() is wire.REPLACED


def test_the_owner_of_a_number_replaces_its_process_at_once_with_a_newer_one():
    syncer = SyncerEnd(security=OWN)
    with ended(syncer, old := LearnerEnd(syncer.address, security=OWN.of(0))):
        joined(syncer, old)
        assert isinstance(hello(syncer, OWN.of(0), process=99), grpc.RpcError), "an older one"
        with ended(new := LearnerEnd(syncer.address, process=101, security=OWN.of(0))):
            assert new.client.accepted.wait(TIMEOUT)
            assert new.client.newest_incarnation == 100
            assert syncer.next(events.LearnerLost) == events.LearnerLost(0, 100, "replaced")
            until(lambda: old.client.refusal is not None, "the refusal of the old one")


@pytest.mark.parametrize(("process", "states"), [(100, ["starting"]), (103, ["failed", "starting"])])
def test_a_restarted_syncer_tells_a_learner_that_went_on_from_one_that_came_again(process, states):
    syncer = SyncerEnd(opened=False)
    syncer.server.know([(0, 102)])  # the process was told to rejoin twice
    with ended(syncer, learner := LearnerEnd(syncer.address, process=process)):
        assert learner.client.accepted.wait(TIMEOUT)
        found = [r.state.value for r in syncer.records if isinstance(r, records.StateChanged)]
        assert found == states


def test_a_process_that_comes_back_while_its_session_still_ends_is_let_in_and_not_taken_for_lost():
    syncer = SyncerEnd()
    answers, came = queue.SimpleQueue(), threading.Thread(target=lambda: answers.put(hello(syncer)))
    lost = syncer.server.intake.lost

    def once_it_is_here_again(*whose):
        syncer.server.intake.lost = lost
        came.start()
        came.join(0.5)  # it may be let in only once this has returned
        lost(*whose)

    with ended(syncer):
        syncer.server.intake.lost = once_it_is_here_again
        malformed = [greeting(), b"\xff\xff\xff"]
        with (
            grpc.insecure_channel(syncer.address) as channel,
            pytest.raises(grpc.RpcError, match="malformed"),
        ):
            list(channel.stream_stream(wire.CONTROL)(iter(malformed), timeout=TIMEOUT))
        assert answers.get(timeout=TIMEOUT).session
        assert syncer.drops() == ["wire: malformed message"]


def test_a_session_that_ends_as_a_learner_joins_leaves_no_learner_that_nobody_hears_is_lost():
    syncer = SyncerEnd()
    connect, ends = syncer.connect, []

    def as_it_ends(learner, incarnation, link):
        ends.append(threading.Thread(target=syncer.server._end, args=(link, "connection lost")))
        ends[0].start()
        ends[0].join(0.5)  # it may end only once the learner has joined
        connect(learner, incarnation, link)

    syncer.connect = as_it_ends
    with ended(syncer, learner := LearnerEnd(syncer.address)):
        learner.send(events.LearnerJoined(0, 100))
        assert syncer.next(events.LearnerJoined).incarnation == 100
        assert syncer.next(events.LearnerLost).incarnation == 100


def test_what_learners_say_is_not_read_while_too_much_of_it_waits():
    syncer = SyncerEnd()
    syncer.crowded = True
    with ended(syncer, learner := LearnerEnd(syncer.address)):
        learner.send(events.LearnerJoined(0, 100))
        assert learner.client.accepted.wait(TIMEOUT)
        with pytest.raises(queue.Empty):
            syncer.heard.get(timeout=0.3)
        syncer.crowded = False
        assert syncer.next(events.LearnerJoined).incarnation == 100


def test_with_tokens_of_their_own_learners_speak_for_no_other():
    syncer = SyncerEnd(security=OWN)
    with ended(syncer, honest := LearnerEnd(syncer.address, 1, security=OWN.of(1))):
        joined(syncer, honest, number=1)
        with ended(liar := LearnerEnd(syncer.address, 1, process=500, security=OWN.of(0))):
            assert liar.client.accepted.wait(TIMEOUT)
            assert liar.client.refusal == "these are the credentials of learner 0, not of learner 1"
        assert syncer.drops() == ["wire: another learner's number"]
        [alarm] = syncer.alarms()
        assert "with the credentials of learner 0 asked for the place of learner 1" in alarm
        for stranger in (Security("of no learner here"), Security()):
            assert hello(syncer, stranger).code() is grpc.StatusCode.UNAUTHENTICATED
        works(syncer, honest, number=1)
        assert honest.client.connections == 1


def test_a_certificate_of_its_own_binds_a_learner_to_its_number(tmp_path):
    certificates(tmp_path, "--learners=2")
    syncer = SyncerEnd(security=load_security(None, str(tmp_path / "syncer")))
    own = [load_security(None, str(tmp_path / f"learner-{m}")) for m in range(2)]
    with ended(syncer, learner := LearnerEnd(syncer.address, 0, security=own[0])):
        joined(syncer, learner)
        refused = hello(syncer, own[1], learner=0)
        assert refused.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert refused.details() == "these are the credentials of learner 1, not of learner 0"
        assert hello(syncer, own[1], learner=1).session
        both = dataclasses.replace(own[1], token="the token of learner 0")
        syncer.server._security = dataclasses.replace(syncer.server._security, tokens=OWN.tokens)
        assert "not of learner 0" in hello(syncer, both, learner=0).details(), "token and name disagree"


def test_no_process_claims_a_number_that_leaves_no_room_for_later_ones():
    syncer = SyncerEnd(security=ALL)
    with ended(syncer):
        refused = hello(syncer, process=FURTHEST + 1)
        assert refused.code() is grpc.StatusCode.FAILED_PRECONDITION
        with ended(learner := LearnerEnd(syncer.address, process=FURTHEST, security=ALL)):
            joined(syncer, learner, FURTHEST)
        syncer.next(events.LearnerLost)
        with ended(later := LearnerEnd(syncer.address, security=ALL)):
            assert later.client.accepted.wait(TIMEOUT)
            joined(syncer, later, later.client.newest_incarnation + 1)


def silent_calls(address, security, paths, count):
    """Calls that send nothing, as many of each kind; the channels to close at the end."""
    never, channels = threading.Event(), []

    def nothing():
        never.wait(TIMEOUT)
        yield from ()

    for n in range(count):
        if n % 50 == 0:
            channels.append(security.channel(address, wire.options(20.0)))
        for path in paths:
            channels[-1].stream_stream(path)(nothing(), metadata=security.metadata)
    return channels, never


class Call:
    """A call as the server has it, of which only what a test asks for is there."""

    def __init__(self, peer="ipv4:10.0.0.1:80", host=0):
        self.ended, self._peer, self._host = threading.Event(), peer, str(host)
        self.context = self

    async def read(self):
        await asyncio.Event().wait()

    def peer(self):
        return self._peer

    def invocation_metadata(self):
        return [(wire.HOST_KEY, self._host)]

    def cancel(self):
        self.ended.set()


def test_a_machine_that_floods_the_syncer_with_calls_keeps_no_other_from_joining():
    handshakes = Handshakes(TIMEOUT, 3)
    one, *many = [Call(f"ipv4:10.0.0.{host}:80") for host in (1, 2, 2, 2)]

    async def flood():
        tasks = []
        for n, call in enumerate((one, *many)):
            tasks.append(asyncio.create_task(handshakes.first(call)))
            await asyncio.sleep(0)
            assert len(handshakes._waiting) == min(n + 1, 3)
        assert [call.ended.is_set() for call in (one, *many)] == [False, True, False, False]
        for task in tasks:
            task.cancel()

    asyncio.run(flood())


@pytest.mark.parametrize("room", [1, 2])
def test_a_learner_that_claims_many_hosts_takes_no_more_calls_than_there_is_room_for(room):
    """Else it would take all of them, and no other learner's fragments would travel."""
    syncer = SyncerEnd(dataclasses.replace(TERMS, hosts=(room, 1)))
    most = MAX_CALLS * room
    with ended(syncer):
        refused = hello(syncer, Security(), hosts=most + 1)
        assert refused.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert refused.details().endswith(f"where the syncer has room for {most}, by remote.hosts")
        assert hello(syncer, Security(), hosts=most).session
    session = Session("name", 0, 100, Downlink(NewestFragments(), hosts=most), room=room)
    with contextlib.ExitStack() as calls:
        for host in range(most):
            calls.enter_context(session.call("updates", Call(host=host)))
        with pytest.raises(Refused, match=f"more than {most} calls"):
            calls.enter_context(session.call("updates", Call()))
        calls.enter_context(session.call("offers", Call()))


def test_answers_that_a_learner_does_not_read_are_few_and_end_with_its_session():
    """Else they would be all of the syncer's calls, and keep everybody out."""
    syncer = SyncerEnd()
    with ended(syncer, learner := LearnerEnd(syncer.address)):
        joined(syncer, learner)
        [session] = syncer.server._sessions.values()
        named = ((wire.SESSION_KEY, session.name),)
        with grpc.insecure_channel(syncer.address, UNREAD) as channel:
            ask = channel.stream_stream(wire.PEERS)
            calls = [ask(iter([b""]), metadata=named) for _ in range(2 * MAX_CALLS)]
            until(lambda: sum(call.done() for call in calls) == MAX_CALLS, "refusals of half of them")
            learner.client.finish(0.0)
            until(lambda: not session._open_calls, "the end of the others")


def test_a_call_of_a_learner_that_reads_nothing_ends_with_its_session(monkeypatch):
    """Else one that connects again and again would have all of the syncer's calls, at last."""
    monkeypatch.setattr(sessions, "LAST_SECONDS", 0.1)
    syncer, never = SyncerEnd(), threading.Event()

    def messages():
        yield greeting()
        never.wait(TIMEOUT)

    with ended(syncer), Security().channel(syncer.address, wire.options(20.0)) as channel:
        call = channel.stream_stream(wire.CONTROL)(messages())
        until(lambda: syncer.server._sessions, "the session")
        [session] = syncer.server._sessions.values()
        for _ in range(20):  # more than the transport takes for it
            session.say(pb.ToLearner(accepted=pb.Accepted(run="x" * (900 << 10))))
        until(lambda: len(session._waiting) < 20, "the first of it")
        syncer.server._end(session, "evicted")
        until(session.control._task.done, "the end of the call")
        assert call.is_active(), "it has not read that far"
        never.set()


@pytest.mark.parametrize("security", [Security(), ALL], ids=["without the token", "with it"])
def test_calls_that_send_nothing_do_not_keep_a_donor_from_giving(security):
    with Steps(given := state(2), ALL) as donor:
        channels, never = silent_calls(donor.address, security, (wire.DONATE,), 12)
        assert_same(ask(donor.address, security=ALL), given)
        never.set()
        for channel in channels:
            channel.close()


def test_learners_show_each_other_what_the_syncer_gave_them_not_what_they_show_to_it():
    syncer = SyncerEnd(security=OWN)
    with ended(syncer, one := LearnerEnd(syncer.address, security=OWN.of(0))):
        assert one.client.accepted.wait(TIMEOUT)
        with ended(two := LearnerEnd(syncer.address, 1, security=OWN.of(1))):
            assert two.client.accepted.wait(TIMEOUT)
            assert one.client.peers_token == two.client.peers_token != ""
            assert one.client.peers_token not in OWN.tokens.values()


def test_a_learner_of_another_run_is_refused_in_one_line_by_either_end(tmp_path):
    first = SyncerEnd(run="a" * 32)
    with ended(first, learner := LearnerEnd(first.address)):
        assert learner.client.accepted.wait(TIMEOUT)
        assert learner.client.run == "a" * 32
        refused = hello(first, Security(), learner=1, run="b" * 32)
        assert refused.details() == "the learner is of run bbbbbbbb, the syncer of run aaaaaaaa"
        assert refused.code() is grpc.StatusCode.FAILED_PRECONDITION
        learner.client.book._run = "c" * 32  # as if it had been of another one when this one let it in
        learner.client._control.cancel()
        until(lambda: learner.client.refusal is not None, "the refusal")
