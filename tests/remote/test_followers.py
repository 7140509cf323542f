"""Host 0 and those that follow it, over real connections."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import json
import queue
import threading
import time
import types

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddiloco.data.errors import DataError
from ddiloco.data.host_batches import HostBatches
from ddiloco.launch.ports import reserved_port
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.work import LearnerWork
from ddiloco.remote.learner.follower import ReportingBatches
from ddiloco.remote.learner.host_arrays import LeadingArrays
from ddiloco.remote.learner.hosts import HostPlace
from ddiloco.remote.learner.leading import HostRecovery, Lead
from ddiloco.remote.learner.likeness import MEANINGFUL_STEPS
from ddiloco.remote.learner.process import LearnerProcess
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.compatibility import terms_of
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.validation import WireError
from ddiloco.run.recipes import assembly_of
from ddiloco.storage import bounded_reads
from ddiloco.storage.learner_state import (
    LearnerState,
    LearnerStates,
    OfAllHosts,
    StateHeader,
    StateOfAllHosts,
)
from ddiloco.workers.exchange import InnerState
from experiments.cli.credentials import load_security
from tests.learner_states import needs_all, state_with
from tests.remote.donors import OF_A_HOST, assert_same, notes, recovery, state, with_client
from tests.remote.ends import TIMEOUT, SyncerEnd, certificates, ended, until, update, welcome
from tests.remote.host_ends import SECURITY, Host, Leading
from tests.workbench import experiment


@pytest.fixture
def leading():
    """What leads two followers, and its address."""
    made = Leading(2)
    with reserved_port() as port, contextlib.ExitStack() as stack:
        made.address = f"127.0.0.1:{port}"
        made.followers.start(made.address)
        stack.callback(made.close)
        yield made


@pytest.mark.parametrize("problem", ["", "host 2: No space left on device"])
@pytest.mark.parametrize("what", ["go_on", "keep"])
def test_a_learner_goes_on_or_has_a_checkpoint_in_a_snapshot_once_all_hosts_have_done_their_part(
    leading, problem, what, tmp_path
):
    hosts, lead = leading.hosts(), Lead.__new__(Lead)
    lead.followers = leading.followers
    if what == "keep":
        states = LearnerStates(tmp_path / "learners" / "0", needs_all)
        recovery = HostRecovery(leading.followers, None, None, None, None, states)
        header = StateHeader("run", "", ("f32", False, False), LearnerWork(4, 1, 4, ()), None, 1, 4, 9, 4)
        state = LearnerState(header, StateOfAllHosts({"params/w": np.ones(3)}, 7))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        done = pool.submit(lead.go_on, 7) if what == "go_on" else pool.submit(recovery.keep, state, 3)
        for host, told in zip(hosts, ("", problem), strict=True):
            order = host.next()
            assert order.go_on == 7 if what == "go_on" else (order.save.copy, order.save.snapshot) == (7, 3)
            assert not done.done()
            host.say(done=pb.FromHost.Done(copy=7, problem=told))
        if problem:
            with pytest.raises(WireError, match="not all hosts"):
                done.result(TIMEOUT)
        else:
            done.result(TIMEOUT)
    if what == "keep":
        assert (tmp_path / "snapshots" / "000003" / "learners" / "0" / "state.0.7").exists()


def test_a_host_whose_disk_hangs_keeps_no_learner_from_joining_otherwise(leading, monkeypatch):
    monkeypatch.setattr(bounded_reads, "LONGEST", 0.1)
    hosts, lead = leading.hosts(), Lead.__new__(Lead)
    lead.followers = leading.followers
    with pytest.raises(WireError, match="not all hosts"):
        lead.go_on(4)
    assert [host.next().go_on for host in hosts] == [4, 4]


@pytest.mark.parametrize(
    ("security", "following", "code"),
    [
        (Security("another"), {}, grpc.StatusCode.UNAUTHENTICATED),
        (SECURITY, {"host": 0}, grpc.StatusCode.INVALID_ARGUMENT),
        (SECURITY, {"host": 3}, grpc.StatusCode.INVALID_ARGUMENT),
        (SECURITY, {"learner": 1}, grpc.StatusCode.INVALID_ARGUMENT),
        (SECURITY, {"fingerprint": "another"}, grpc.StatusCode.INVALID_ARGUMENT),
        (SECURITY, {"rules": '{"seed": 1}'}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_who_is_no_host_of_the_learner_gets_no_orders_and_ends_nothing(leading, security, following, code):
    stranger = Host(leading.address, security, **following)
    until(lambda: stranger.error is code, "a refusal")
    assert leading.lost == []


def test_with_certificates_of_their_own_no_learner_is_another_s_host(tmp_path):
    certificates(tmp_path, "--learners=2")
    own = [load_security(None, str(tmp_path / f"learner-{m}")) for m in range(2)]
    leading = Leading(1, own[0])
    with reserved_port() as port, contextlib.closing(leading):
        address = f"localhost:{port}"
        leading.followers.start(address)
        stranger = Host(address, own[1])
        until(lambda: stranger.error is grpc.StatusCode.PERMISSION_DENIED, "a refusal")
        host = Host(address, own[0])
        assert leading.followers.gather(threading.Event(), pytest.fail)
        leading.followers.order(pb.Order(step=2))
        assert host.next().step == 2 and leading.lost == []


def test_a_second_process_under_a_host_s_number_is_refused(leading):
    first, other = leading.hosts()
    second = Host(leading.address)
    until(lambda: second.error is grpc.StatusCode.ALREADY_EXISTS, "a refusal")
    leading.followers.order(pb.Order(step=2))
    assert [first.next().step, other.next().step] == [2, 2]
    assert leading.lost == []


def test_what_the_syncer_sends_is_delivered_once_all_hosts_have_it(leading):
    one, two = leading.hosts()
    first, second, third = welcome(7), update(0, 3), update(0, 4)
    leading.followers.own(first)
    one.here({"welcome": 7})
    two.here({"welcome": 7})
    until(lambda: leading.delivered == [first], "the welcome")
    leading.followers.own(second)
    one.here({"fragment": 0, "version": 3})
    leading.followers.own(third)
    for host in (one, two):
        host.here({"fragment": 0, "version": 4})
    until(lambda: leading.delivered == [first, third], "the newer update")
    two.here({"fragment": 0, "version": 3})  # it came late, and is not delivered after a newer one
    two.say(leaving=True)
    assert leading.left.wait(TIMEOUT)
    assert leading.delivered == [first, third]


def test_a_version_of_a_history_that_was_undone_does_not_stand_for_the_one_made_after_it(leading):
    one, two = leading.hosts()
    for host in (one, two):
        host.here({"fragment": 0, "version": 7, "lineage": 1})  # which host 0 did not get
    event = dataclasses.replace(update(0, 7).event, lineage=2)
    again = dataclasses.replace(update(0, 7), event=event)
    leading.followers.own(again)
    one.here({"fragment": 0, "version": 7, "lineage": 2})
    leading.followers.order(pb.Order(step=1))
    assert leading.delivered == []
    two.here({"fragment": 0, "version": 7, "lineage": 2})
    until(lambda: leading.delivered == [again], "the version made anew")


def test_a_host_may_have_the_next_version_before_the_others_have_this_one_whatever_its_lineage(leading):
    one, two = leading.hosts()
    first, second = (
        dataclasses.replace(told, event=dataclasses.replace(told.event, lineage=lineage))
        for told, lineage in ((update(0, 5), 9), (update(0, 6), 1))  # lineages have no order
    )
    for told in (first, second):
        which = {"fragment": 0, "version": told.event.version, "lineage": told.event.lineage}
        one.here(which)
        leading.followers.own(told)
    two.here({"fragment": 0, "version": 5, "lineage": 9})
    until(lambda: leading.delivered == [first], "this version")
    two.here({"fragment": 0, "version": 6, "lineage": 1})
    until(lambda: leading.delivered == [first, second], "the next one")


def test_tokens_and_positions_of_a_batch_are_waited_for(leading):
    hosts = [Host(leading.address, host=number) for number in (1, 2)]
    for number, host in enumerate(hosts, start=1):
        host.say(drawn=pb.Drawn(number=1, shards=[number], tokens=[10 * number], position=str(number)))
    drawn = leading.followers.drawn(1)
    assert sorted((d.position, *d.shards, *d.tokens) for d in drawn) == [("1", 1, 10), ("2", 2, 20)]


def test_the_loss_of_a_host_is_told(leading):
    hosts = leading.hosts()
    hosts[1].leave()
    until(lambda: leading.lost, "the loss")
    assert leading.lost[0].startswith("host 2 of the learner is gone")


def test_copies_count_that_all_hosts_have(leading):
    hosts = leading.hosts({"copies": [5, 6]}, {"copies": [6, 7]})
    assert leading.followers.copies() == {6}
    hosts[0].say(kept=8)  # while they run
    hosts[1].say(kept=7)
    hosts[1].say(kept=8)
    until(lambda: leading.followers.copies() == {6, 8}, "the copies that were kept meanwhile")


def test_a_peer_s_state_is_there_once_all_hosts_have_their_blocks_of_it(leading):
    hosts = leading.hosts({"donor_port": 7071}, {"donor_port": 7072})
    assert leading.followers.donors() == ["127.0.0.1:7071", "127.0.0.1:7072"]

    def told(copy, *problems):
        order = pb.Order.Fetch(copy=copy, addresses=["127.0.0.1:1"], like=5, seconds=4.0)
        with leading.followers.doing(copy, pb.Order(fetch=order)):
            assert [host.next().fetch for host in hosts] == [order] * 2
            for host, problem in zip(hosts, problems, strict=False):
                host.say(done=pb.FromHost.Done(copy=8, problem="of another copy"))
                host.say(done=pb.FromHost.Done(copy=copy, problem=problem))
            leading.followers.done(copy, time.monotonic() + (TIMEOUT if len(problems) == 2 else 0.2))

    told(9, "", "")
    with pytest.raises(wire.WireError, match="host 2: they"):
        told(10, "", "host 2: they are unlike")
    with pytest.raises(wire.WireError, match="takes too long"):
        told(11, "")
    with pytest.raises(OSError), leading.followers.doing(12, pb.Order(copy=12)):
        raise OSError("host 0's own blocks do not come")
    assert leading.followers._done == {}


class Given:
    """A peer's open donation."""

    def __init__(self, copy):
        self.rest, self.until = (copy, ["127.0.0.1:1"]), time.monotonic() + TIMEOUT

    def take(self):
        return state(2)


def test_hosts_let_go_of_a_peer_s_state_with_host_0_and_where_one_of_them_lacks_it(leading):
    hosts, recovers = leading.hosts(), HostRecovery.__new__(HostRecovery)
    recovers._followers, recovers._like = leading.followers, 0
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for copy, problem in ((8, "host 2: they are unlike"), (9, "")):
            taking = pool.submit(recovers._taken, Given(copy))
            for host in hosts:
                assert host.next().fetch.copy == copy
                host.say(done=pb.FromHost.Done(copy=copy, problem=problem))
            if problem:
                assert problem in str(taking.exception(TIMEOUT))
            else:
                found = taking.result(TIMEOUT)
                assert_same(found, state(2))
                assert found.arrays.number == copy
            del taking
            gc.collect()
            if not problem:
                leading.followers.order(pb.Order(step=1))
                assert [host.next().step for host in hosts] == [1, 1], "it is still here"
                del found
            assert [host.next().drop for host in hosts] == [copy, copy]


def test_whose_streams_end_has_them_made_anew_with_that_shard_unless_others_took_their_place(leading):
    one, two = leading.hosts()
    heard, shards = [], [(0, "a:1"), (1, "b:1"), (1, "b:2")]
    for number, (shard, address) in enumerate(shards, start=1):
        streams = pb.Order.Streams(session="session", shard=shard, address=address)
        leading.followers.connect(streams, lambda error, n=number: heard.append((n, error)))
    orders = [one.next().streams for _ in shards]
    assert [(o.session, o.shard, o.address) for o in orders] == [("session", *s) for s in shards]
    assert [two.next().streams.number for _ in shards] == [o.number for o in orders]
    for broken in (orders[1], orders[0], orders[2]):
        one.say(broken=broken.number)
    until(lambda: len(heard) == 2, "the word of two")
    assert [number for number, _ in heard] == [1, 3]
    assert all(isinstance(error, wire.WireError) for _, error in heard)


def test_data_that_cannot_be_read_end_the_host_that_waits_for_them():
    class Unreadable:
        """Rows of sub-shard 1 until its file breaks."""

        def __init__(self):
            self._left = 1

        def __next__(self):
            if not self._left:
                raise DataError("a shard is damaged")
            self._left -= 1
            return {"weights": np.ones((2, 3))}

        def get_state(self):
            return {"shards": {}}

    said = queue.SimpleQueue()
    batches = ReportingBatches(HostBatches(Unreadable(), (1,), (0, 1), 4), said)
    batches.begin("")
    assert next(batches).tokens == {1: 6}
    assert said.get(timeout=TIMEOUT).drawn.number == 1
    with pytest.raises(DataError, match="damaged"):
        next(batches)


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("there", [1, 2])
def test_hosts_leave_with_host_0_that_is_asked_to_end_before_its_learner_is_accepted(
    data_dir, there, monkeypatch
):
    monkeypatch.setattr("ddiloco.remote.learner.leading.end_at_once", pytest.fail)
    e = experiment(data_dir, driver="remote", remote={"hosts": (3, 1)})
    assembly, stop = assembly_of(e), threading.Event()
    terms = terms_of(e, assembly.layout)
    with reserved_port() as nobody, reserved_port() as port:
        place = HostPlace(0, 3, f"127.0.0.1:{port - 1}")
        process = LearnerProcess(assembly, SECURITY, place)
        left = []
        run = lambda: left.append(process.run(0, f"127.0.0.1:{nobody}", stop, print))  # noqa: E731
        thread = threading.Thread(target=run)
        thread.start()
        agreed = {"fingerprint": terms.fingerprint, "rules": terms.rules}
        hosts = [Host(place.leader, host=1 + number, **agreed) for number in range(there)]
        until(lambda: process._lead and len(process._lead.followers._orders) == there, "the hosts")
        stop.set()
        for host in hosts:
            order = host.next()
            assert order.HasField("leave") and order.leave, order
        thread.join(TIMEOUT)
    assert left == [None]


def test_others_find_host_0_while_it_still_opens_its_data(data_dir, monkeypatch):
    """Of a machine that is new, where they must be prepared; those that have theirs do not wait for ever."""
    monkeypatch.setattr("ddiloco.remote.learner.hosts.end_at_once", lambda why, code: None)
    e = experiment(data_dir, driver="remote", remote={"hosts": (2, 1)})
    assembly, found = assembly_of(e), threading.Event()

    def open_data(learner):
        assert found.wait(TIMEOUT), "nobody found it"
        raise DataError("they cannot be prepared")

    monkeypatch.setattr(assembly, "check_learner", open_data)
    terms = terms_of(e, assembly.layout)
    with reserved_port() as nobody, reserved_port() as port, concurrent.futures.ThreadPoolExecutor(1) as pool:
        place = HostPlace(0, 2, f"127.0.0.1:{port - 1}")
        process = LearnerProcess(assembly, SECURITY, place)
        ran = pool.submit(process.run, 0, f"127.0.0.1:{nobody}", threading.Event(), print)
        host = Host(place.leader, fingerprint=terms.fingerprint, rules=terms.rules)
        until(lambda: process._lead and process._lead.followers._orders, "the host")
        found.set()
        with pytest.raises(DataError):
            ran.result(TIMEOUT)
        process._lead.followers.stop()
        host.leave()


class Sound:
    """Batches that can only go on from one position."""

    def __init__(self):
        self.at = None

    def set_state(self, position):
        if position != {"at": 7}:
            raise DataError("of other data")
        self.at = position


@pytest.mark.parametrize("sound", [True, False])
def test_where_host_0_cannot_go_on_in_its_data_no_host_is_told_to(leading, sound):
    """A host that was told to would fail, each time it is started."""
    hosts, batches = leading.hosts(), Sound()
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    equipment = types.SimpleNamespace(batches=batches, program=types.SimpleNamespace(mesh=mesh))
    arrays = LeadingArrays(equipment, print, LearnerCore(0, 1, SyncPolicy()), leading.followers)
    if sound:
        arrays.draw_from({"at": 7})
    else:
        with pytest.raises(DataError):
            arrays.draw_from({"at": 8})
        arrays.draw_from(None)
    assert [host.next().begin for host in hosts] == [json.dumps({"at": 7}) if sound else ""] * 2
    assert batches.at == ({"at": 7} if sound else None)
    with pytest.raises(RuntimeError, match="must begin anew"):
        arrays.draw_from({"at": 7})


def test_copies_of_steps_that_a_rollback_has_undone_are_not_taken(leading, tmp_path):
    syncer = SyncerEnd()
    hosts = leading.hosts(copies=[70, 77])
    with ended(syncer, end := with_client(syncer.address, 0)):
        states = LearnerStates(tmp_path, needs_all)
        for number, versions in ((70, (2, 2)), (77, (3, 4))):
            arrays = OfAllHosts([jnp.asarray(array) for array in state(number).arrays], number)
            states.keep(state_with(InnerState(7, versions, arrays, trained=MEANINGFUL_STEPS)))
        make = functools.partial(recovery, end, tmp_path, inner=OF_A_HOST)
        make = functools.partial(make, make=functools.partial(HostRecovery, leading.followers))
        assert make().inner_state((4, 3)) is None
        assert make().inner_state((3, 4)).arrays.number == 77
        until(lambda: len(notes(syncer)) == 2, "the notes")
        assert syncer.drops() == ["own copy: of steps that were undone"]
        assert not syncer.alarms()
    assert all(host.error is None for host in hosts)
