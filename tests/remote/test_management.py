"""What an operator may ask of a running syncer, and who may."""

import shutil
import threading

import grpc
import pytest

from ddiloco.config import ConfigError
from ddiloco.protocol import events
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.remote.syncer.management import Management
from ddiloco.remote.wire.management import MANAGE, Answer, Command, ask
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.validation import WireError
from ddiloco.storage import operator_orders
from ddiloco.storage.operator_orders import StandingOrders
from ddiloco.storage.run_mark import RunMarkError
from ddiloco.workers.exchange import Leave
from ddiloco.workers.retiming import Retiming
from tests.remote.ends import TERMS, TIMEOUT, LearnerEnd, SyncerEnd, joined


def there(syncer, number, **more):
    """A learner that has joined."""
    learner = LearnerEnd(syncer.address, number, **more)
    joined(syncer, learner, more.get("process", 100), number)
    return learner


OWN = Security(
    tokens={0: "the token of learner 0", 1: "the token of learner 1"}, operator="the operator's token"
)


@pytest.fixture
def managed():
    """A syncer whose management is wired to what the tests see."""
    made = []

    def make(security=None, snapshots=False):
        stopped, told = threading.Event(), []
        management = Management(
            security or Security(),
            TERMS.num_learners,
            lambda: 7,
            lambda: snapshots,
            stopped.set,
            told.append,
        )
        syncer = SyncerEnd(security=security, management=management)
        syncer.stopped, syncer.told = stopped, told
        made.append(syncer)
        return syncer

    yield make
    for syncer in made:
        syncer.server.stop(1.0)


def asked(syncer, verb, learner=None, security=None):
    return ask(syncer.address, security or Security(), Command(verb, learner), TIMEOUT)


def refusal(syncer, security, verb="stop"):
    with pytest.raises(grpc.RpcError) as error:
        asked(syncer, verb, security=security)
    return error.value.code(), error.value.details()


def test_a_learner_that_is_drained_leaves_and_is_sent_away_until_it_is_added(managed):
    syncer = managed()
    learner = there(syncer, 1)
    assert asked(syncer, "drain", 1).done
    learner.next(Leave)
    learner.client.finish(TIMEOUT)
    syncer.next(events.LearnerLost)
    status = asked(syncer, "status")
    assert status.facts == {"step": 7, "present": [], "drained": [1], "num_learners": 2, "shards": []}
    assert status.line == "step 7; learners: none of 2; drained: 1"
    back = LearnerEnd(syncer.address, 1, process=200)  # its engine has started it again
    back.next(Leave)
    back.client.finish(TIMEOUT)
    assert asked(syncer, "add", 1) == Answer(True, "learner 1 may come", {"learner": 1})
    again = there(syncer, 1, process=300)
    assert asked(syncer, "status").facts["present"] == [1]
    again.client.finish(TIMEOUT)


def test_a_learner_that_is_evicted_is_lost_at_once_and_another_process_may_come(managed):
    syncer = managed()
    hung = there(syncer, 1)
    assert asked(syncer, "evict", 1) == Answer(True, "learner 1 is dropped; it may rejoin", {"learner": 1})
    assert syncer.next(events.LearnerLost).reason == "evicted"
    assert asked(syncer, "status").facts["present"] == []
    again = there(syncer, 1, process=200)  # at once, though the first one's silence is not over
    assert asked(syncer, "status").facts["present"] == [1]
    for learner in (hung, again):
        learner.client.finish(TIMEOUT)
    assert asked(syncer, "evict", 0) == Answer(False, "learner 0 is not there", {"learner": 0})


def test_the_first_number_that_is_free_is_given(managed):
    syncer = managed()
    first = there(syncer, 0)
    assert asked(syncer, "add").facts == {"learner": 1}
    second = there(syncer, 1)
    answer = asked(syncer, "add")
    assert (answer.done, answer.line) == (False, "all 2 learners of config.remote.max_learners are there")
    for learner in (first, second):
        learner.client.finish(TIMEOUT)


def test_numbers_of_no_learner_are_refused(managed):
    syncer = managed()
    told = "a learner's number is below 2, by config.remote.max_learners"
    assert asked(syncer, "drain", 2) == Answer(False, told)
    assert asked(syncer, "add", 2) == Answer(False, told)
    assert asked(syncer, "drain") == Answer(False, told)


def test_a_snapshot_is_taken_where_any_are(managed):
    assert not asked(managed(), "snapshot").done
    assert asked(managed(snapshots=True), "snapshot").done


def test_the_run_ends_at_the_word_and_says_who_asked(managed):
    syncer = managed()
    assert asked(syncer, "stop").done and syncer.stopped.is_set()
    (line,) = syncer.told
    assert line.endswith("asked to stop: the run ends, with everything saved")


def test_a_timing_is_checked_sent_to_the_core_and_kept_for_the_next_syncer(tmp_path):
    sent = []

    def made(**policy):
        retiming = Retiming(SyncPolicy(num_learners=2, **policy), sent.append)
        return Management(Security(), TERMS.num_learners, folder=tmp_path, retiming=retiming)

    first = made()
    refused = first.do(Command("set", settings={"num_fragments": 3}), "here")
    assert not refused.done and refused.line.startswith("config.sync.num_fragments: cannot change")
    assert not first.do(Command("set"), "here").done and not sent
    assert first.do(Command("set", settings={"interval": 12}, reason="links"), "here").done
    assert first.do(Command("set", settings={"quorum": 2}, reason="more"), "here").done
    assert [(timing.interval, timing.quorum, timing.reason) for timing in sent] == [
        (12, 1, "links"),
        (12, 2, "more"),
    ]
    assert first.do(Command("status"), "here").line.endswith("; sync.interval=12, sync.quorum=2")
    other = made()  # another shard, or the next process
    assert sent[2:] == [sent[1]]
    first.do(Command("set", settings={"interval": 6}), "here")
    other.look()
    assert [timing.interval for timing in sent[3:]] == [6, 6]
    with pytest.raises(ConfigError, match=r"^config\.sync\.interval: cannot change during this run"):
        made(quorum=None, max_run_ahead=0)


def test_what_was_asked_outlasts_the_syncer_unless_the_disk_refuses(tmp_path):
    def made():
        return Management(Security(), TERMS.num_learners, folder=tmp_path)

    first = made()
    for learner in (0, 1):
        first.do(Command("drain", learner), "here")
    first.do(Command("add", 0), "here")
    first.do(Command("stop"), "here")
    assert operator_orders.load(tmp_path) == StandingOrders(stopped=True, drained=(1,))
    second = made()
    assert (second.drained(0), second.drained(1)) == (False, True)
    assert operator_orders.load(tmp_path) == StandingOrders(stopped=False, drained=(1,)), "it goes on"
    for damaged in ("", "[]", '{"stopped": 1}', '{"stopped": true, "drained": [[]]}', "[" * 100_000):
        (tmp_path / operator_orders.NAME).write_text(damaged)
        with pytest.raises(RunMarkError, match=r"^.*operator.json: cannot be used: [A-Za-z]+$"):
            made()
    shutil.rmtree(tmp_path)
    answer = second.do(Command("drain", 0), "here")
    assert answer.done and "ends after its step, but a restarted syncer will not know it: " in answer.line
    assert second.drained(0)


def test_a_disk_that_hangs_keeps_nobody_from_hearing_who_is_drained(tmp_path, monkeypatch):
    free, writes = threading.Event(), threading.Event()

    def hang(word, folder):
        writes.set()
        assert free.wait(TIMEOUT)

    monkeypatch.setattr(StandingOrders, "save", hang)
    management = Management(Security(), TERMS.num_learners, folder=tmp_path)
    command = threading.Thread(target=management.do, args=(Command("drain", 1), "here"), daemon=True)
    command.start()
    assert writes.wait(TIMEOUT)
    asked = threading.Thread(target=management.drained, args=(0,), daemon=True)
    asked.start()
    asked.join(TIMEOUT / 2)
    assert not asked.is_alive()
    free.set()
    command.join(TIMEOUT)
    assert management.drained(1)


def test_only_the_operator_manages_learners_with_tokens_of_their_own(managed):
    syncer = managed(OWN)
    assert refusal(syncer, OWN.of(0))[0] is grpc.StatusCode.PERMISSION_DENIED
    assert refusal(syncer, Security())[0] is grpc.StatusCode.UNAUTHENTICATED
    assert not syncer.stopped.is_set()
    assert asked(syncer, "stop", security=Security(OWN.operator)).done


def test_the_operator_is_no_learner(managed):
    syncer = managed(OWN)
    impostor = LearnerEnd(syncer.address, 0, security=Security(OWN.operator))
    assert impostor.client.accepted.wait(TIMEOUT)
    assert impostor.client.refusal == "these are the credentials of the operator, not of learner 0"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"verb": "eval"}',
        b'{"verb": "set", "settings": {"interval": "x"}}',
        b'{"verb": "drain", "learner": -1}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_command_is_refused(managed, data):
    with pytest.raises(WireError):
        Command.read(data)
    syncer = managed()
    with grpc.insecure_channel(syncer.address) as channel, pytest.raises(grpc.RpcError) as error:
        channel.unary_unary(MANAGE)(data, timeout=TIMEOUT)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
