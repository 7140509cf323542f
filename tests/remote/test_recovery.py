"""Where a learner that joins has its inner optimizer state from, whoever gives, hangs, lies or joins too."""

import concurrent.futures
import contextlib
import dataclasses
import threading

import grpc
import numpy as np
import pytest

from ddiloco.protocol import events
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.storage import array_file, bounded_reads
from tests.remote.donors import FORMAT, THREE, Steps, assert_same, keep, notes, recovery, state, with_client
from tests.remote.ends import TIMEOUT, SyncerEnd, ended, joined, until


@contextlib.contextmanager
def peers_and_joiner(*donors, boundary_seconds=lambda learner: 0.0):
    """A syncer, learners 1, 2, ... that count, each with its donor, and learner 0, which joins."""
    syncer = SyncerEnd(terms=THREE, boundary_seconds=boundary_seconds)
    with contextlib.ExitStack() as held:
        for donor in donors:
            held.enter_context(donor)
        held.enter_context(ended(syncer))
        late = with_client(syncer.address, 0)
        held.enter_context(ended(late))
        peers = []
        for m, donor in enumerate(donors, 1):
            peers.append(with_client(syncer.address, m, int(donor.address.rpartition(":")[2])))
            held.enter_context(ended(peers[-1]))
            joined(syncer, peers[-1], number=m)
        yield syncer, late, *peers


def test_a_joining_learner_finds_the_peer_that_steps_and_tells_of_it():
    with peers_and_joiner(Steps(given := state(2))) as (syncer, late, _):
        assert_same(recovery(late).inner_state((3, 4)), given)
        until(lambda: notes(syncer), "the note")
        note = notes(syncer)[0]
        assert (note["learner"], note["inner_state"], note["donor_step"]) == (0, "peer", 7)
        assert note["bytes"] == FORMAT.bytes


def test_a_peer_is_asked_only_while_the_syncer_counts_it():
    with peers_and_joiner(donor := Steps(given := state(2))) as (syncer, late, peer):
        # As one that was told that it is no member, since a rollback has undone what it holds.
        peer.send(events.LearnerJoined(1, 101, 9, (8, 8), (3, 3)))
        syncer.next(events.LearnerJoined)
        assert recovery(late).inner_state((3, 4)) is None
        assert not donor.wishes
        syncer.links[1, 101].begun(101)
        assert_same(recovery(late).inner_state((3, 4)), given)


def test_learners_that_join_together_do_not_wait_for_each_other():
    syncer = SyncerEnd()
    with Steps(None) as one, Steps(None) as other, ended(syncer) as _:
        ends = [
            with_client(syncer.address, m, int(donor.address.rpartition(":")[2]))
            for m, donor in enumerate((one, other))
        ]
        with ended(*ends), concurrent.futures.ThreadPoolExecutor() as threads:
            for m, end in enumerate(ends):
                joined(syncer, end, number=m)
            asking = recovery(ends[0], stepping=lambda steps: steps or one.donor.detach())
            found = threads.submit(asking.inner_state, (3, 4))
            until(lambda: other.wishes, "the first to ask the second")
            assert recovery(ends[1]).inner_state((3, 4)) is None
            assert not one.wishes
            other.wishes[0].answer.set_result(given := state(2))
            assert_same(found.result(TIMEOUT), given)


def test_without_a_peer_the_own_copy_serves_and_without_that_a_fresh_one(tmp_path):
    with peers_and_joiner() as (syncer, end):
        assert recovery(end, tmp_path).inner_state((3, 4)) is None
        keep(tmp_path, given := state(2))
        assert_same(recovery(end, tmp_path).inner_state((9, 9)), given)
        (path,) = tmp_path.glob("state.*")
        path.write_bytes(path.read_bytes()[:-9])
        assert recovery(end, tmp_path).inner_state((3, 4)) is None
        until(lambda: len(notes(syncer)) == 3, "three notes")
        assert [n["inner_state"] for n in notes(syncer)] == ["fresh", "checkpoint", "fresh"]
        until(syncer.alarms, "the alarm")


def test_an_own_copy_on_a_disk_that_hangs_is_not_waited_for_where_a_peer_gives(tmp_path, monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(bounded_reads, "LONGEST", 0.1)
    monkeypatch.setattr(array_file, "load", lambda path, magic: never.wait())
    keep(tmp_path, state(1))
    with peers_and_joiner(Steps(given := state(2))) as (syncer, late, _):
        assert_same(recovery(late, tmp_path).inner_state((3, 4)), given)
        until(lambda: any("the disk hangs" in alarm for alarm in syncer.alarms()), "the alarm")
    never.set()


def test_an_own_copy_of_steps_that_a_rollback_has_undone_is_not_taken(tmp_path):
    with peers_and_joiner() as (syncer, end):
        keep(tmp_path, given := state(2, versions=(3, 4)))
        assert recovery(end, tmp_path).inner_state((4, 3)) is None
        assert_same(recovery(end, tmp_path).inner_state((3, 5)), given)
        until(lambda: len(notes(syncer)) == 2, "the notes")
        assert [n["inner_state"] for n in notes(syncer)] == ["fresh", "checkpoint"]
        assert syncer.drops() == ["own copy: of steps that were undone"]


def test_a_peer_that_gives_garbage_is_counted_and_the_next_one_is_asked(tmp_path):
    keep(tmp_path, dataclasses.replace(state(1), trained=800))
    with np.errstate(invalid="ignore"):  # some of its arrays are whole numbers
        garbage = dataclasses.replace(state(np.nan), trained=900)  # more than the other: it is taken first
    given = dataclasses.replace(state(2), trained=800)
    with peers_and_joiner(Steps(garbage), Steps(given)) as (syncer, late, *_):
        assert_same(recovery(late, tmp_path).inner_state((3, 4)), given)
        until(lambda: "peer: donation not finite" in syncer.drops(), "the drop")


def test_a_peer_s_state_with_fewer_steps_in_it_does_not_replace_the_own_copy(tmp_path):
    fewer, old = (dataclasses.replace(state(value), trained=n) for value, n in ((1, 800), (2, 900)))
    with peers_and_joiner(donor := Steps(fewer)) as (syncer, late, _):
        keep(tmp_path, old)
        found = recovery(late, tmp_path).inner_state((3, 4))
        assert (found.trained, found.step) == (900, 7)
        assert_same(found, old)
        donor.given = dataclasses.replace(state(5), trained=900)
        assert_same(recovery(late, tmp_path).inner_state((3, 4)), state(5))
        until(lambda: len(notes(syncer)) == 2, "the notes")
        told = [(n["inner_state"], n["trained"]) for n in notes(syncer)]
        assert told == [("checkpoint", 900), ("peer", 900)]


@pytest.mark.parametrize("poison", [-1.0, 1e8])
@pytest.mark.parametrize("copies", ["an own copy", "another peer"])
def test_what_a_lying_peer_gives_is_not_taken_however_much_it_has_trained(tmp_path, poison, copies):
    """It would make the steps of every learner that returns useless, or not finite."""
    bad = Steps(dataclasses.replace(state(poison), trained=1 << 50))
    honest = dataclasses.replace(state(2), trained=900)
    others = [Steps(honest)] if copies == "another peer" else []
    with peers_and_joiner(bad, *others) as (syncer, late, *_):
        if not others:
            keep(tmp_path, honest)
            assert_same(recovery(late, tmp_path).inner_state((3, 4)), honest)
        else:  # nobody can tell which of two is true
            assert recovery(late).inner_state((3, 4)) is None
            bad.given = dataclasses.replace(state(3), trained=901)
            assert_same(recovery(late).inner_state((3, 4)), honest)
        until(lambda: "peer: unlike others" in syncer.drops(), "the drop")


def test_a_donor_that_hangs_takes_nothing_of_the_time_of_the_next(tmp_path):
    given = dataclasses.replace(state(2), trained=800)
    keep(tmp_path, dataclasses.replace(state(1), trained=800))
    with peers_and_joiner(hangs := Steps(None), Steps(given)) as (syncer, late, *_):
        found = recovery(late, tmp_path, donation_timeout=TIMEOUT).inner_state((3, 4))
        assert_same(found, given)
        until(lambda: hangs.wishes[0].answer.cancelled(), "the hanging donor to be let go of")
        [note] = notes(syncer) or [None]
        assert note is None or note["seconds"] < TIMEOUT / 2


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
        self._never.wait(TIMEOUT)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._never.set()
        self._server.stop(grace=None).wait(5.0)


def test_a_donor_that_trickles_leaves_time_for_the_next(tmp_path):
    given = dataclasses.replace(state(2), trained=800)
    keep(tmp_path, dataclasses.replace(state(1), trained=800))
    with peers_and_joiner(Trickles(), Steps(given)) as (_, late, *_):
        assert_same(recovery(late, tmp_path, donation_timeout=6.0).inner_state((3, 4)), given)


def test_one_of_two_peers_that_keeps_the_other_from_giving_is_not_believed():
    lie = dataclasses.replace(state(-1.0), trained=1 << 50)
    with peers_and_joiner(Steps(None), Steps(lie)) as (_, late, *_):
        assert recovery(late).inner_state((3, 4)) is None


def test_an_inner_state_that_does_not_come_in_time_is_an_alarm_that_names_the_setting():
    with peers_and_joiner(Steps(None)) as (syncer, late, _):
        assert recovery(late, donation_timeout=0.1).inner_state((3, 4)) is None
        told = "came within 0 s, by remote.donation_timeout"
        until(lambda: any(alarm.endswith(told) for alarm in syncer.alarms()), "the alarm")


def test_a_peer_has_the_time_that_its_steps_take_beside_the_time_for_its_state():
    slow = Steps(given := state(2), longest=1.0, boundary=TIMEOUT)
    slow.after = 1.5
    with peers_and_joiner(slow, boundary_seconds=lambda learner: TIMEOUT * learner) as (_, late, _):
        assert_same(recovery(late, donation_timeout=1.0).inner_state((3, 4)), given)


def test_who_joins_waits_for_the_steps_of_the_fastest_peer():
    seconds = {1: 1e6, 2: 2.5, 3: 0.0}
    donors = [Steps(None), Steps(None)]
    with peers_and_joiner(*donors, boundary_seconds=seconds.get) as (_, late, *_):
        assert late.client.peers(TIMEOUT).boundary_seconds == 2.5


def test_before_the_first_merge_all_begin_alike_whoever_comes_first():
    with peers_and_joiner(donor := Steps(given := state(2))) as (_, late, _):
        assert recovery(late).inner_state((0, 0)) is None
        assert not donor.wishes
        assert_same(recovery(late).inner_state((0, 1)), given)


def test_a_peer_s_state_that_comes_at_a_tenth_of_the_syncer_s_fragments_is_an_alarm():
    with peers_and_joiner(Steps(state(2))) as (syncer, late, _):
        late.client.throughput.add(FORMAT.bytes, 1e-9)
        recovers = recovery(late)
        recovers._timed(1.9)  # which delays nobody
        recovers._timed(4.0)
        late.client.finish(TIMEOUT)
        (told,) = [alarm for alarm in syncer.alarms() if "a peer's inner state of" in alarm]
        assert told.startswith(
            "learner 0: a peer's inner state of 1.4 MB took 4.0 s, at 0.35 MB/s; before it"
        )
