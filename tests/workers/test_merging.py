"""What a syncer hands out of its fragments is of the version that it names."""

import queue
import threading

import numpy as np
import pytest

from ddiloco.outer.fragments import fragment
from ddiloco.outer.global_model import GlobalModel, NextVersion
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.storage.tape.recorder import SyncerTape
from ddiloco.workers.merging import Merged, Merging
from ddiloco.workers.syncer_worker import SyncerWorker


@pytest.fixture
def merging():
    config = OuterConfig(merge="direct", optimizer="direct")
    model = GlobalModel(fragment({"a": (2,)}, 1), {"a": np.zeros(2, np.float32)}, config, num_learners=2)
    made = Merging(
        model, SyncPolicy(1, overlap=1), lambda message: None, lambda record: None, None, SyncerTape()
    )
    yield made
    made.end()


def merged(version):
    pieces, difference = (np.full(2, version, np.float32),), (np.full(2, -version, np.int8),)
    made = NextVersion(pieces, {}, difference=difference)
    return Merged(events.MergeFinished(RoundId(version, 0)), version, made, {}, None)


def handed_out(merging, event):
    told = merging.with_pieces(actions.Tell(((0, 1),), event))
    return [piece[0] for pieces in told.fragments for piece in pieces], [x[0] for x in told.difference]


def test_a_version_that_the_core_does_not_tell_of_yet_is_not_handed_out_in_place_of_the_one_before(merging):
    """A part's core tells of a merge once the authority knows of it; learners join and ask meanwhile."""
    for version in (1, 2):
        merging.take(merged(version))
        before = version - 1
        welcome = events.Welcomed(1, before, (before,), (before,))
        assert handed_out(merging, welcome) == ([before], [])
        again = events.UpdateArrived(0, before, before)
        assert handed_out(merging, again) == ([before], [-before] if before else [])
        assert handed_out(merging, events.UpdateArrived(0, version, version)) == ([version], [-version])
    assert [pieces[0][0] for pieces in merging.newest()] == [2]
    assert merging.with_pieces(actions.Tell(((0, 1),), events.NotMember(1))).fragments == ()


def test_a_merge_writes_into_the_memory_of_a_version_that_nobody_is_told_of_any_more():
    size, inbox, places = 1 << 16, queue.SimpleQueue(), []
    model = GlobalModel(fragment({"a": (size,)}, 1), {"a": np.zeros(size, np.float32)}, OuterConfig(), 1)
    merging = Merging(model, SyncPolicy(1, overlap=1), inbox.put, lambda record: None, None, SyncerTape())
    for version in range(1, 7):
        round_id, given = RoundId(version, 0), Contribution(0, 1, 0, version - 1, version, 1, 10)
        event = events.FragmentArrived(round_id, given)
        merging.arrivals.keep(event, [], (np.full(size, version, np.float32),))
        merging.merge(actions.Merge(round_id, version, (given,)))
        done = inbox.get(timeout=30.0)
        merging.take(done)
        places.append(done.made.pieces[0].ctypes.data)
        del done  # a test that holds a version keeps its memory from being written
        assert merging.told(0)["merge_seconds"] > 0.0
    merging.end()
    assert len(set(places)) == 2


def test_a_commit_for_which_there_is_no_thread_ends_the_syncer_and_not_its_merges_alone(monkeypatch):
    inbox = queue.SimpleQueue()
    model = GlobalModel(fragment({"a": (2,)}, 1), {"a": np.zeros(2, np.float32)}, OuterConfig(), 1)
    merging = Merging(model, SyncPolicy(1, overlap=1), inbox.put, lambda record: None, None, SyncerTape())

    def refused(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(merging._committer, "submit", refused)
    round_id, given = RoundId(1, 0), Contribution(0, 1, 0, 0, 1, 1, 10)
    event = events.FragmentArrived(round_id, given)
    merging.arrivals.keep(event, [], (np.ones(2, np.float32),))
    merging.merge(actions.Merge(round_id, 1, (given,)))
    assert str(inbox.get(timeout=30.0)) == "can't start new thread"
    merging.end()


def test_that_a_merge_failed_is_known_though_the_disk_holds_another():
    free = threading.Event()
    model = GlobalModel(fragment({"a": (2,)}, 1), {"a": np.zeros(2, np.float32)}, OuterConfig(), 1)
    core = SyncerCore(SyncPolicy(num_learners=1, num_fragments=1, interval=4))
    worker = SyncerWorker(core, model, lambda record: None)
    worker._merging._committer.submit(free.wait, 60.0)
    worker.start()
    worker.send(MemoryError("no room for a merge"))
    assert worker.ended.wait(30.0)
    assert worker.failure.startswith("MemoryError: no room for a merge") and not worker.stop(0.0)
    free.set()
    assert worker.stop(30.0)
