"""Inner optimizer states from learner to learner, over a real wire: of which boundary, to whom, what not."""

import concurrent.futures
import contextlib
import dataclasses
import pathlib
import queue
import subprocess
import threading

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddiloco.config import ConfigError
from ddiloco.observe import records
from ddiloco.outer.blocks import Blocks, Cut, box_of
from ddiloco.remote.learner import client, inner_files
from ddiloco.remote.learner.donor import Donor
from ddiloco.remote.learner.gift import Gift, fetch, fetch_copy
from ddiloco.remote.learner.host_copies import HostCopies, OfAllHosts
from ddiloco.remote.learner.inner_format import InnerFormat
from ddiloco.remote.learner.recovery import Checkpointer, ProcessRecovery
from ddiloco.remote.wire import agreement as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.agreement import WireError
from ddiloco.remote.wire.security import Security, donor_address
from ddiloco.roles.exchange import InnerState, InnerStateWanted
from ddiloco.settings.remote import RemoteConfig
from experiments.front.credentials import load_security
from tests.remote.ends import CONFIG, PATIENCE, TERMS, LearnerEnd, SyncerEnd, ended, joined, until

ROOT = pathlib.Path(__file__).parents[2]
LEAVES = (
    jax.ShapeDtypeStruct((), np.int32),
    jax.ShapeDtypeStruct((500, 700), np.float32),  # more than a chunk
    jax.ShapeDtypeStruct((0, 3), np.float32),
)
FORMAT = InnerFormat(LEAVES)
THREE = dataclasses.replace(TERMS, num_learners=3, most_learners=3)


def state(value, step=7, versions=(3, 4)):
    """An inner state that holds its value."""
    return InnerState(step, versions, [np.full(leaf.shape, value, leaf.dtype) for leaf in LEAVES])


class Steps:
    """A donor's worker: answers a wish once it holds the versions asked for."""

    def __init__(self, given, security=None, longest=PATIENCE, inner=FORMAT, others=()):
        self.inbox, self.wishes = queue.SimpleQueue(), []
        self.donor = Donor(security or Security(), 20.0, others=lambda: others)
        self.address = f"127.0.0.1:{self.donor.start('127.0.0.1')}"
        self.given = given
        self.donor.attach(self.inbox, inner, longest)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while (wish := self.inbox.get()) is not None:
            assert isinstance(wish, InnerStateWanted)
            self.wishes.append(wish)
            if self.given is not None and wish.answer.set_running_or_notify_cancel():
                wish.answer.set_result(self.given)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.inbox.put(None)
        self.donor.stop()


def ask(address, versions=(3, 4), inner=FORMAT, security=None, timeout=PATIENCE):
    return fetch(address, versions, inner, security or Security(), 20.0, timeout)


def assert_same(ours, theirs):
    for one, other in zip(ours.arrays, theirs.arrays, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)
    assert (ours.step, ours.versions) == (theirs.step, theirs.versions)


def test_an_inner_state_arrives_bit_for_bit_with_the_boundary_it_is_of():
    with Steps(given := state(2)) as donor:
        assert_same(ask(donor.address), given)
        assert donor.wishes[0].versions == (3, 4)
        for _ in range(20):
            assert_same(ask(donor.address), given)  # and again: the one before has let go of the donor


def test_a_learner_that_does_not_step_yet_refuses_at_once():
    donor = Donor(Security(), 20.0)
    address = f"127.0.0.1:{donor.start('127.0.0.1')}"
    with pytest.raises(grpc.RpcError) as raised:
        ask(address)
    assert raised.value.details() == "the learner does not step yet"
    donor.stop()


def test_a_wish_that_nobody_waits_for_any_longer_is_cancelled():
    with Steps(None) as donor:
        with pytest.raises(grpc.RpcError) as raised:
            ask(donor.address, timeout=0.5)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        until(lambda: donor.wishes[0].answer.cancelled(), "the wish to be cancelled")


def test_a_peer_that_asks_while_the_call_before_ends_waits_its_turn():
    with Steps(None) as donor, concurrent.futures.ThreadPoolExecutor() as others:
        first = others.submit(ask, donor.address, timeout=1.0)
        until(lambda: donor.wishes, "the first wish")
        donor.given = state(2)
        assert_same(ask(donor.address), donor.given)
        assert first.exception().code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (state(np.nan), "donation not finite"),
        (state(1, versions=(3, 3)), "donation of another time"),
        (state(1, versions=(3,)), "donation of another time"),
        (InnerState(7, (3, 4), [*state(1).arrays[:2], np.zeros((1, 3), np.float32)]), "blocks of another"),
    ],
)
def test_what_does_not_fit_is_refused(given, why):
    with Steps(given) as donor, np.errstate(invalid="ignore"), pytest.raises(WireError, match=why):
        ask(donor.address)


COPY = 77
ROWS, ALL = (((0, 300), (0, 700)), ((300, 500), (0, 700))), [Cut.whole(leaf.shape) for leaf in LEAVES]


def of_host(whole, number):
    """What one of two hosts answers for: half of the rows of the second leaf, host 0 all of the others."""
    rows = Cut(LEAVES[1].shape, (ROWS[number],))
    cuts = [ALL[0], rows, ALL[2]] if number == 0 else [Cut(ALL[0].shape, ()), rows, Cut(ALL[2].shape, ())]
    return [
        Blocks(x.shape, dict(zip(c.boxes, c.of(x), strict=True))) for x, c in zip(whole, cuts, strict=True)
    ]


@contextlib.contextmanager
def two_hosts(copy=COPY, addresses=lambda other: [other]):
    """A donor of two hosts, where what it gives is, and the address of its second host."""
    whole = [np.asarray(jax.random.normal(jax.random.key(0), x.shape), x.dtype) for x in LEAVES]
    second = Donor(Security(), 20.0, {copy: of_host(whole, 1)})
    port = f"127.0.0.1:{second.start('127.0.0.1')}"
    second.attach(None, FORMAT)
    given = InnerState(7, (3, 4), OfAllHosts(of_host(whole, 0), COPY))
    with Steps(given, others=addresses(port)) as first:
        yield first, whole, port
    second.stop()


def test_a_learner_of_two_hosts_gives_a_peer_what_each_of_them_has():
    with two_hosts() as (donor, whole, _):
        assert_same(ask(donor.address), InnerState(7, (3, 4), whole))


def test_each_host_of_a_peer_gets_its_own_blocks_while_the_gift_is_open():
    columns = [(slice(None), slice(0, 400)), (slice(None), slice(400, 700))]
    formats = [
        InnerFormat(LEAVES, [ALL[0], Cut(LEAVES[1].shape, (box_of(c, LEAVES[1].shape),)), ALL[2]])
        for c in columns
    ]
    with two_hosts() as (donor, whole, _):
        gift = Gift(donor.address, (3, 4), formats[0], Security(), 20.0, PATIENCE).open()
        taken = gift.take().arrays
        copy, hosts = gift.rest
        others = fetch_copy(hosts, copy, formats[1], Security(), 20.0, PATIENCE)
        for blocks, own in ((taken, columns[0]), (others, columns[1])):
            assert blocks[0].all == whole[0]
            np.testing.assert_array_equal(blocks[1].all, whole[1][own])
        gift.close()

        def gone():
            error = error_of(lambda: fetch_copy(hosts[:1], copy, formats[1], Security(), 20.0, PATIENCE))
            return error is not None and error.code() is grpc.StatusCode.NOT_FOUND

        until(gone, "the donor to let go of it")


@pytest.mark.parametrize(
    ("copy", "addresses", "error", "why"),
    [
        (COPY, lambda other: [], WireError, "donation with gaps"),
        (COPY, lambda other: [other, other], WireError, "donation with gaps"),
        (COPY, lambda other: ["unix:/tmp/x"], WireError, "hosts that are nowhere"),
        (COPY, lambda other: [other] * 1025, WireError, "hosts that are nowhere"),
        (COPY + 1, lambda other: [other], grpc.RpcError, "no such copy"),
    ],
)
def test_a_donor_of_hosts_that_do_not_make_a_whole_is_refused(copy, addresses, error, why):
    with two_hosts(copy, addresses) as (donor, *_), pytest.raises(error, match=why):
        ask(donor.address)


def test_a_host_takes_no_blocks_that_are_unlike_its_own_copy(tmp_path):
    copies, whole = HostCopies(tmp_path, 1, FORMAT), [jnp.ones(leaf.shape, leaf.dtype) for leaf in LEAVES]
    copies.save(5, whole, {})
    for factor, alike in ((2, True), (1000, False), (-1, False)):
        blocks = of_host([factor * np.asarray(x) for x in whole], 0)
        assert (error_of(lambda b=blocks: copies.check_like(5, b)) is None) is alike
        copies.check_like(0, blocks)
    assert "cannot be read" in str(error_of(lambda: copies.check_like(6, blocks)))


def error_of(call):
    """What it raises; None: nothing."""
    try:
        call()
    except (grpc.RpcError, ValueError) as error:
        return error
    return None


def test_another_optimizer_s_state_is_refused_before_it_travels():
    with Steps(state(1)) as donor, pytest.raises(WireError, match="another inner optimizer"):
        ask(donor.address, inner=InnerFormat(LEAVES[:2]))


def test_beyond_the_loopback_a_donor_asks_for_a_token_as_the_syncer_does():
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        Donor(Security(), 20.0).start("0.0.0.0")
    donor = Donor(Security(token="t" * 32), 20.0)
    assert donor.start("0.0.0.0")
    donor.stop()


def test_without_the_token_there_is_no_donation():
    with Steps(state(1), Security(token="t" * 32)) as donor:
        with pytest.raises(grpc.RpcError) as raised:
            ask(donor.address, security=Security(token="u" * 32))
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert not donor.wishes
        assert_same(ask(donor.address, security=Security(token="t" * 32)), state(1))


def test_learners_know_each_other_by_their_certificates(tmp_path):
    subprocess.run([ROOT / "scripts/make_certs.sh", tmp_path / "c", "localhost"], check=True)
    learner = load_security(None, str(tmp_path / "c/learner"))
    with Steps(state(1), learner) as donor:
        assert_same(ask(donor.address, security=learner), state(1))
        with pytest.raises(grpc.RpcError):
            ask(donor.address, timeout=3.0)


@pytest.mark.parametrize(
    ("peer", "port", "address"),
    [
        ("ipv4:10.0.0.7:5123", 80, "10.0.0.7:80"),
        ("ipv6:%5B::1%5D:5123", 80, "[::1]:80"),
        ("unix:/tmp/socket", 80, None),
        ("ipv4:10.0.0.7:5123", 0, None),
        ("ipv4:10.0.0.7:5123", 70000, None),
    ],
)
def test_a_donor_is_where_its_connection_comes_from(peer, port, address):
    assert donor_address(peer, port) == address


def with_client(address, learner, donor_port=0, process=100):
    """A learner's end that names a donor's port, and recovers by its client."""
    end = LearnerEnd.__new__(LearnerEnd)
    end.inbox, end.notes = queue.SimpleQueue(), []
    end.client = client.SyncerClient(
        address, learner, process, TERMS, Security(), CONFIG, end.notes.append, donor_port
    )
    end.client.attach(end)
    end.client.start()
    end.send = end.client.outbox.send
    assert end.client.accepted.wait(PATIENCE)
    return end


def notes(syncer):
    return [r.values for r in syncer.records if getattr(r, "name", "") == "recovered"]


def recovery(end, folder=None, **changes):
    config = dataclasses.replace(RemoteConfig(), **changes)
    return ProcessRecovery(end.client, FORMAT, Security(), config, folder)


def test_a_joining_learner_finds_the_peer_that_steps_and_tells_of_it():
    syncer = SyncerEnd()
    with Steps(given := state(2)) as donor, ended(syncer) as _:
        port = int(donor.address.rpartition(":")[2])
        with ended(first := with_client(syncer.address, 1, port), late := with_client(syncer.address, 0)):
            joined(syncer, first, number=1)
            assert_same(recovery(late).inner_state((3, 4)), given)
            until(lambda: notes(syncer), "the note")
            note = notes(syncer)[0]
            assert (note["learner"], note["inner_state"], note["donor_step"]) == (0, "peer", 7)
            assert note["bytes"] == FORMAT.bytes


def test_without_a_peer_the_own_copy_serves_and_without_that_a_fresh_one(tmp_path):
    syncer = SyncerEnd()
    with ended(syncer, end := with_client(syncer.address, 0)):
        assert recovery(end, tmp_path).inner_state((3, 4)) is None
        inner_files.save(tmp_path, FORMAT, given := state(2))
        assert_same(recovery(end, tmp_path).inner_state((9, 9)), given)
        (tmp_path / "inner_state").write_bytes(b"ddiloco inner state 1\nand no more")
        assert recovery(end, tmp_path).inner_state((3, 4)) is None
        until(lambda: len(notes(syncer)) == 3, "three notes")
        assert [n["inner_state"] for n in notes(syncer)] == ["fresh", "checkpoint", "fresh"]
        until(lambda: any(isinstance(r, records.Alarm) for r in syncer.records), "the alarm")


def test_a_peer_that_gives_garbage_is_counted_and_the_next_one_is_asked(tmp_path):
    syncer = SyncerEnd(terms=THREE)
    inner_files.save(tmp_path, FORMAT, dataclasses.replace(state(1), trained=800))
    garbage = dataclasses.replace(state(np.nan), trained=900)  # more than the other: it is taken first
    given = dataclasses.replace(state(2), trained=800)
    with Steps(garbage) as bad, Steps(given) as good, ended(syncer) as _:
        ports = [int(donor.address.rpartition(":")[2]) for donor in (bad, good)]
        with ended(
            late := with_client(syncer.address, 0),
            first := with_client(syncer.address, 1, ports[0]),
            again := with_client(syncer.address, 2, ports[1]),
        ):
            joined(syncer, first, number=1)
            joined(syncer, again, number=2)
            with np.errstate(invalid="ignore"):
                assert_same(recovery(late, tmp_path).inner_state((3, 4)), given)
            until(lambda: "peer: donation not finite" in syncer.drops(), "the drop")


def test_a_peer_s_state_with_fewer_steps_in_it_does_not_replace_the_own_copy(tmp_path):
    syncer = SyncerEnd()
    fresh, old = (dataclasses.replace(state(value), trained=n) for value, n in ((0, 0), (2, 900)))
    with Steps(fresh) as donor, ended(syncer) as _:
        port = int(donor.address.rpartition(":")[2])
        with ended(first := with_client(syncer.address, 1, port), late := with_client(syncer.address, 0)):
            joined(syncer, first, number=1)
            inner_files.save(tmp_path, FORMAT, old)
            found = recovery(late, tmp_path).inner_state((3, 4))
            assert (found.trained, found.step) == (900, 7)
            assert_same(found, old)
            donor.given = dataclasses.replace(state(5), trained=900)
            assert_same(recovery(late, tmp_path).inner_state((3, 4)), state(5))
            until(lambda: len(notes(syncer)) == 2, "the notes")
            told = [(n["inner_state"], n["trained"]) for n in notes(syncer)]
            assert told == [("checkpoint", 900), ("peer", 900)]


@pytest.mark.parametrize("poison", [-1.0, 1e8, 0.0])
@pytest.mark.parametrize("copies", ["an own copy", "another peer"])
def test_what_a_lying_peer_gives_is_not_taken_however_much_it_has_trained(tmp_path, poison, copies):
    """It would make the steps of every learner that returns useless, or not finite."""
    syncer = SyncerEnd(terms=THREE)
    lie = dataclasses.replace(state(poison), trained=1 << 50)
    honest = dataclasses.replace(state(2), trained=900)
    with Steps(lie) as bad, Steps(honest) as good, ended(syncer) as _:
        ports = [int(donor.address.rpartition(":")[2]) for donor in (bad, good)]
        with ended(
            late := with_client(syncer.address, 0),
            first := with_client(syncer.address, 1, ports[0]),
            again := with_client(syncer.address, 2, ports[1] if copies == "another peer" else 0),
        ):
            joined(syncer, first, number=1)
            joined(syncer, again, number=2)
            if copies == "an own copy":
                inner_files.save(tmp_path, FORMAT, honest)
                assert_same(recovery(late, tmp_path).inner_state((3, 4)), honest)
            else:  # nobody can tell which of two is true
                assert recovery(late).inner_state((3, 4)) is None
                bad.given = dataclasses.replace(state(3), trained=901)
                assert_same(recovery(late).inner_state((3, 4)), honest)
            until(lambda: "peer: unlike others" in syncer.drops(), "the drop")


def test_a_donor_that_hangs_takes_nothing_of_the_time_of_the_next(tmp_path):
    syncer = SyncerEnd(terms=THREE)
    given = dataclasses.replace(state(2), trained=800)
    inner_files.save(tmp_path, FORMAT, dataclasses.replace(state(1), trained=800))
    with Steps(None) as hangs, Steps(given) as good, ended(syncer) as _:
        ports = [int(donor.address.rpartition(":")[2]) for donor in (hangs, good)]
        with ended(
            late := with_client(syncer.address, 0),
            first := with_client(syncer.address, 1, ports[0]),
            other := with_client(syncer.address, 2, ports[1]),
        ):
            joined(syncer, first, number=1)
            joined(syncer, other, number=2)
            found = recovery(late, tmp_path, donation_timeout=PATIENCE).inner_state((3, 4))
            assert_same(found, given)
            until(lambda: hangs.wishes[0].answer.cancelled(), "the hanging donor to be let go of")
            [note] = notes(syncer) or [None]
            assert note is None or note["seconds"] < PATIENCE / 2


class Trickles:
    """A donor that says it has trained longest, and then gives one byte and no more."""

    def __init__(self):
        self._never = threading.Event()
        self._server = wire.server(20.0, 4)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        wire.serve(self._server, wire.DONATE, {"Donate": grpc.stream_stream_rpc_method_handler(self._donate)})

    def _donate(self, requests, context):
        versions = pb.DonationRequest.FromString(next(requests)).versions
        given = {"format": FORMAT.fingerprint, "step": 7, "versions": versions, "size": FORMAT.bytes}
        yield pb.DonationHeader(**given, trained=1 << 50).SerializeToString()
        yield b"x"
        self._never.wait(PATIENCE)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._never.set()
        self._server.stop(grace=None).wait(5.0)


def test_a_donor_that_trickles_leaves_time_for_the_next(tmp_path):
    syncer = SyncerEnd(terms=THREE)
    given = dataclasses.replace(state(2), trained=800)
    inner_files.save(tmp_path, FORMAT, dataclasses.replace(state(1), trained=800))
    with Trickles() as slow, Steps(given) as good, ended(syncer) as _:
        ports = [int(donor.address.rpartition(":")[2]) for donor in (slow, good)]
        with ended(
            late := with_client(syncer.address, 0),
            first := with_client(syncer.address, 1, ports[0]),
            other := with_client(syncer.address, 2, ports[1]),
        ):
            joined(syncer, first, number=1)
            joined(syncer, other, number=2)
            assert_same(recovery(late, tmp_path, donation_timeout=6.0).inner_state((3, 4)), given)


def test_one_of_two_peers_that_keeps_the_other_from_giving_is_not_believed():
    syncer = SyncerEnd(terms=THREE)
    lie = dataclasses.replace(state(-1.0), trained=1 << 50)
    with Steps(None) as busy, Steps(lie) as bad, ended(syncer) as _:
        ports = [int(donor.address.rpartition(":")[2]) for donor in (busy, bad)]
        with ended(
            late := with_client(syncer.address, 0),
            first := with_client(syncer.address, 1, ports[0]),
            other := with_client(syncer.address, 2, ports[1]),
        ):
            joined(syncer, first, number=1)
            joined(syncer, other, number=2)
            assert recovery(late).inner_state((3, 4)) is None


def test_an_inner_state_that_does_not_come_in_time_is_an_alarm_that_names_the_setting():
    syncer = SyncerEnd()
    with Steps(None) as hangs, ended(syncer) as _:
        port = int(hangs.address.rpartition(":")[2])
        with ended(late := with_client(syncer.address, 0), first := with_client(syncer.address, 1, port)):
            joined(syncer, first, number=1)
            assert recovery(late, donation_timeout=0.1).inner_state((3, 4)) is None
            told = "came within 0 s, by remote.donation_timeout"
            alarms = lambda: [r.sentence for r in syncer.records if isinstance(r, records.Alarm)]  # noqa: E731
            until(lambda: any(alarm.endswith(told) for alarm in alarms()), "the alarm")


def test_a_copy_of_another_run_is_not_used(tmp_path):
    inner_files.save(tmp_path, FORMAT, state(1), run="one")
    with pytest.raises(inner_files.InnerFileError, match="is of another run"):
        inner_files.load(tmp_path, FORMAT, "other")
    assert_same(inner_files.load(tmp_path, FORMAT, "one"), state(1))


def test_a_copy_on_disk_is_the_newest_and_another_optimizer_s_is_refused(tmp_path):
    assert inner_files.load(tmp_path, FORMAT) is None
    inner_files.save(tmp_path, FORMAT, state(1))
    inner_files.save(tmp_path, FORMAT, newest := state(2, step=9))
    assert_same(inner_files.load(tmp_path, FORMAT), newest)
    with pytest.raises(inner_files.InnerFileError, match="another inner optimizer"):
        inner_files.load(tmp_path, InnerFormat(LEAVES[:2]))


def test_any_single_byte_that_changes_is_noticed(tmp_path):
    small = InnerFormat(LEAVES[:1])
    inner_files.save(tmp_path, small, InnerState(1, (0,), [np.int32(5)]))
    path = tmp_path / "inner_state"
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(inner_files.InnerFileError):
            inner_files.load(tmp_path, small)


def test_the_checkpointer_asks_the_worker_and_writes_what_it_gets(tmp_path):
    inbox, told = queue.SimpleQueue(), []
    copies = Checkpointer(inbox, FORMAT, tmp_path, 0.01, told.append)
    copies.start()
    for value in (1, 2):
        wish = inbox.get(timeout=PATIENCE)
        assert wish.versions == ()
        wish.answer.set_result(state(value))
    inbox.get(timeout=PATIENCE)  # the second one is on the disk by now
    assert_same(inner_files.load(tmp_path, FORMAT), state(2))
    assert copies.stop(PATIENCE)
    assert not told


def test_a_folder_that_cannot_be_written_to_is_an_alarm(tmp_path):
    (tmp_path / "file").write_text("in the way")
    inbox, told = queue.SimpleQueue(), []
    copies = Checkpointer(inbox, FORMAT, tmp_path / "file", 0.01, told.append)
    copies.start()
    inbox.get(timeout=PATIENCE).answer.set_result(state(1))
    until(lambda: told, "the alarm")
    assert "is not kept" in told[0].sentence
    assert copies.stop(PATIENCE)
