"""The stream between a syncer's authority and its parts: who is let in, and what comes over it."""

import concurrent.futures
import contextlib
import dataclasses
import queue
import threading
import types

import grpc
import pytest

from ddiloco.protocol import events, news
from ddiloco.protocol.messages import RoundId
from ddiloco.protocol.parts import FromPart, PartConnected, ToPart
from ddiloco.remote.syncer import part_links
from ddiloco.remote.syncer.listening import Listening
from ddiloco.remote.syncer.part import PartServer
from ddiloco.remote.syncer.part_links import PartLinks
from ddiloco.remote.syncer.uplink import PartPlace, Uplink
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.security import Security
from ddiloco.schema import codec
from ddiloco.storage.run_mark import RunMark
from ddiloco.telemetry import records
from tests.remote.ends import CONFIG, PATIENCE, TERMS, LearnerEnd, SyncerEnd, until

TOKENS = Security(tokens={0: "the token of learner 0", 1: "the token of learner 1"})
MARK, NONE = RunMark("run", "start"), RunMark("", "")
COMMITTED = news.Committed(RoundId(4, 0), 2, 7)


class AuthorityEnd:
    """A server for two parts, what its worker would hear, and its monitor."""

    def __init__(self, security, mark=MARK, address="127.0.0.1:0"):
        self.heard, self.records = queue.SimpleQueue(), []
        self.links = PartLinks(2, TERMS, security, mark, self.heard.put, self.records.append)
        self.end = SyncerEnd(security=security, address=address, parts=self.links)

    def next(self):
        return self.heard.get(timeout=PATIENCE)


class PartEnd:
    """The uplink of a part, and what comes."""

    def __init__(self, address, security, part=0, parts=2, mark=NONE):
        self.heard = queue.SimpleQueue()
        place = PartPlace(part, parts, f"127.0.0.1:{7100 + part}")
        self.uplink = Uplink(address, place, TERMS, security, CONFIG, self.heard.put)
        self.uplink.mark = mark
        self.uplink.start()

    def next(self, kind):
        message = self.heard.get(timeout=PATIENCE)
        assert message.HasField(kind), message
        return getattr(message, kind)


@pytest.fixture
def stack():
    with contextlib.ExitStack() as made:
        yield made


def connected(stack, security=TOKENS):
    authority = AuthorityEnd(security)
    stack.callback(authority.end.server.stop, 1.0)
    part = PartEnd(authority.end.address, security)
    stack.callback(part.uplink.finish, 1.0)
    begin = part.next("begin")
    assert (begin.run, begin.start) == ("run", "start")
    assert authority.next() == PartConnected(0)
    return authority, part


def test_news_come_in_order_after_the_roll_call_and_words_and_records_once(stack):
    authority, part = connected(stack)
    authority.links.pass_on(ToPart(None, news.AllPresent()))  # before its roll call: it will hear it there
    authority.links.pass_on(PartConnected(0))
    said = [news.RollCall(), news.Admitted(1, 5), news.Noted(RoundId(4, 1))]
    for told in (*said[:2], said[2]):
        authority.links.pass_on(ToPart(0, told))
    authority.links.pass_on(ToPart(1, news.AllPresent()))  # which is not there
    assert part.next("roll_ends")
    assert [codec.told_by(part.next("news")) for _ in said] == said
    part.uplink.say(COMMITTED)
    assert authority.next() == FromPart(0, COMMITTED)
    noted = records.Noted("round", {"fragment": 1, "learners": [0]}, 5.0)
    for record in (noted, records.Transferred(1, 2, 3)):
        part.uplink.record(record)
    until(lambda: authority.records == [noted, records.Transferred(1, 2, 3)], "the records")


def test_a_part_outlives_its_authority_and_keeps_records_for_the_next_one(stack):
    authority, part = connected(stack)
    part.uplink.record(records.Alarm("first", 1.0))
    until(lambda: len(authority.records) == 1, "the first record")
    port = authority.end.port
    authority.end.server._listening.stop(grace=None)
    until(lambda: part.uplink._control is None, "the end of the connection")
    part.uplink.say(COMMITTED)  # nobody hears it
    part.uplink.record(records.Alarm("second", 2.0))
    other = AuthorityEnd(TOKENS, address=f"127.0.0.1:{port}")
    stack.callback(other.end.server.stop, 1.0)
    assert other.next() == PartConnected(0)
    until(lambda: other.records == [records.Alarm("second", 2.0)], "the second record")
    part.uplink.finish(PATIENCE)
    until(lambda: not other.links._links, "the goodbye")


def test_a_part_that_reads_nothing_any_more_is_cut_off_and_may_come_again(stack, monkeypatch):
    authority, part = connected(stack)
    authority.links.pass_on(PartConnected(0))
    assert part.next("roll_ends")
    hangs, goes_on = threading.Event(), threading.Event()
    stack.callback(goes_on.set)

    def take(message):
        hangs.set()
        goes_on.wait()

    part.uplink._take = take
    authority.links.forward(long := events.OfferFailed(RoundId(4, 0), 0, 5, "x" * (1 << 20)))
    assert hangs.wait(PATIENCE)
    for _ in range(20):  # more than gRPC takes on for one that does not read
        authority.links.forward(long)
    left = []

    def stuck():
        left.append(authority.links._links[0]._waiting.qsize())
        return len(left) > 5 and len(set(left[-5:])) == 1

    until(stuck, "a message that is under way")
    monkeypatch.setattr(part_links, "MOST_WAITING", 10)
    for _ in range(11):
        authority.links.forward(events.OfferFailed(RoundId(4, 0), 0, 5, "x"))
    until(lambda: not authority.links._links, "the end of the connection")
    goes_on.set()
    assert authority.next() == PartConnected(0)


def test_who_is_no_part_of_the_run_is_refused(stack):
    authority, _ = connected(stack)
    address = authority.end.address
    refusals = []
    for security, part, parts in (
        (Security(tokens={0: "another token"}), 1, 2),
        (TOKENS, 1, 3),
        (TOKENS, 2, 2),
    ):
        other = PartEnd(address, security, part, parts)
        assert other.uplink.over.wait(PATIENCE)
        refusals.append(other.uplink.refusal)
    assert "token" in refusals[0]
    assert refusals[1:] == ["it is part 1 of 3, where there are 2", "it is part 2 of 2, where there are 2"]
    with TOKENS.of(0).channel(address, []) as channel:  # a learner with the credentials of its own
        call = channel.stream_stream("/ddiloco.wire.Syncer/Part")
        hello = pb.FromPart(hello=pb.FromPart.Hello(part=1, parts=2)).SerializeToString()
        with pytest.raises(grpc.RpcError, match="not of a syncer's process"):
            next(call(iter([hello]), metadata=TOKENS.of(0).metadata))


def test_a_second_process_waits_and_one_of_another_start_must_read_anew(stack):
    authority, _ = connected(stack)
    second = PartEnd(authority.end.address, TOKENS)
    stack.callback(second.uplink.finish, 1.0)
    old = PartEnd(authority.end.address, TOKENS, part=1)
    assert old.next("begin").run == "run"
    old.uplink.finish(1.0)
    again = PartEnd(authority.end.address, TOKENS, part=1, mark=RunMark("run", "before a rollback"))
    assert again.uplink.over.wait(PATIENCE)
    assert again.uplink.outdated
    assert second.heard.empty()


def test_learners_hear_where_parts_are_and_of_each_that_comes(stack):
    authority, _ = connected(stack)
    learner = LearnerEnd(authority.end.address, security=TOKENS.of(0))
    stack.callback(learner.client.finish, 1.0)
    until(lambda: learner.client._connection is not None, "the connection")
    parts = learner.client._connection._parts
    until(lambda: [p and p.address for p in parts._parts] == ["127.0.0.1:7100", None], "the first part")
    other = PartEnd(authority.end.address, TOKENS, part=1)
    stack.callback(other.uplink.finish, 1.0)
    assert other.next("begin").run == "run"
    assert other.next("session").learner == 0  # which is open already
    at = ["127.0.0.1:7100", "127.0.0.1:7101"]
    until(lambda: [p and p.address for p in parts._parts] == at, "both parts")
    threads = [part.thread for part in parts._parts]
    learner.client.finish(1.0)
    assert not any(thread.is_alive() for thread in threads), "they would abort a process that ends"


def listening_part(stack):
    """A PartServer that answers learners, and the connection of one."""
    worker = types.SimpleNamespace(connect=lambda *link: None, send=None, take_offer=None)
    listening = Listening("127.0.0.1:0", TOKENS, CONFIG, 2)
    stack.callback(listening.stop, None)
    server = PartServer(TERMS, TOKENS, listening, worker, types.SimpleNamespace(record=None), PATIENCE)
    server.start()
    return server, stack.enter_context(TOKENS.of(0).channel(listening.address, []))


def test_a_broken_connection_to_the_authority_ends_no_call_of_a_session_that_is_named_again(stack):
    server, channel = listening_part(stack)
    sessions = [pb.ToPart.Session(name=name, learner=0, process=100) for name in ("stays", "ends")]
    calls = []
    for session in sessions:
        server.open(session)
        metadata = (*TOKENS.of(0).metadata, (wire.SESSION_KEY, session.name))
        calls.append(channel.stream_stream(wire.CONTROL)(iter(()), metadata=metadata))
        server._find(session.name).say(told := pb.ToLearner(leave=True))
        assert pb.ToLearner.FromString(next(calls[-1])) == told
    server.roll_begins()
    server.open(sessions[0])
    server.roll_ends()
    assert next(calls[1], None) is None
    server._find("stays").say(told)
    assert pb.ToLearner.FromString(next(calls[0])) == told


def test_calls_in_sessions_that_there_are_not_leave_room_for_those_that_there_are(stack):
    server, _ = listening_part(stack)
    address = server._listening.address
    channels = [stack.enter_context(TOKENS.of(1).channel(address, [])) for _ in range(9)]

    def call(name, learner=1, channel=channels[0]):
        metadata = (*TOKENS.of(learner).metadata, (wire.SESSION_KEY, name))
        return channel.stream_stream(wire.CONTROL)(iter(()), metadata=metadata)

    held = [call("none", channel=channel) for channel in channels[1:] for _ in range(50)]
    until(lambda: any(one.done() for one in held), "the first that is refused")
    server.open(pb.ToPart.Session(name="known", learner=0, process=100))
    server._find("known").say(told := pb.ToLearner(leave=True))
    assert pb.ToLearner.FromString(next(call("known", 0))) == told


def test_all_hosts_of_a_learner_may_be_ahead_of_the_authority_s_word_of_it(stack):
    """As where a part comes back: who was refused would have all hosts connect again, and it rejoin."""
    terms = dataclasses.replace(TERMS, hosts=(64, 64))
    worker = types.SimpleNamespace(connect=lambda *link: None, send=None, take_offer=None)
    server = PartServer(terms, TOKENS, None, worker, types.SimpleNamespace(record=None), PATIENCE)
    pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(128))
    found = [pool.submit(server._find, "known") for _ in range(128)]
    until(lambda: server._early == 128 or any(one.done() for one in found), "all of them")
    server.open(pb.ToPart.Session(name="known", learner=0, process=100, hosts=64))
    assert all(one.result(PATIENCE) is not None for one in found)


@pytest.mark.parametrize(
    "message",
    [
        pb.FromPart(word=codec.message_of(news.Committed(RoundId(4, 1), 2, 7))),
        pb.FromPart(word=pb.FromPart().word),
        pb.FromPart(records=pb.Records(records=[{"noted": {"name": "x", "json": "{"}}])),
    ],
    ids=["another's fragment", "no word", "no record"],
)
def test_what_cannot_be_is_told_in_an_alarm_and_ends_only_the_connection(stack, message):
    authority, part = connected(stack)
    part.uplink._put(message)
    assert authority.next() == PartConnected(0)  # again
    [alarm] = [record for record in authority.records if isinstance(record, records.Alarm)]
    assert alarm.sentence.startswith("part 0 of the syncer: what it sent cannot be read: ")
