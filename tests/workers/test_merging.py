"""Merges on their own threads: whose memory they write into, and what becomes of those that fail."""

import queue
import threading

import numpy as np

from ddiloco.outer.fragments import fragment
from ddiloco.outer.global_model import GlobalModel
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.protocol import actions
from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.storage.tape.recorder import SyncerTape
from ddiloco.workers.merging import Merging, SignedOffer
from ddiloco.workers.syncer_actor import FragmentVersion, SyncerActor
from ddiloco.workers.syncer_worker import SyncerWorker
from tests.workers.test_syncer_actor import Decided, Driver


def test_a_merge_writes_into_the_memory_of_a_version_that_nobody_is_told_of_any_more():
    size, inbox, places = 1 << 16, queue.SimpleQueue(), []
    model = GlobalModel(fragment({"a": (size,)}, 1), {"a": np.zeros(size, np.float32)}, OuterConfig(), 1)
    merging = Merging(model, SyncPolicy(1, overlap=1), inbox.put, lambda record: None, None, SyncerTape())
    actor = SyncerActor(Decided(), Driver(), {0: FragmentVersion(*model.fragment(0))})
    for version in range(1, 7):
        round_id, given = RoundId(version, 0), Contribution(0, 1, 0, version - 1, version, 1, 10)
        offer = SignedOffer(model.read(0, (np.full(size, version, np.float32),)))
        merging.merge(actions.Merge(round_id, version, (given,)), [(given, offer)])
        done = inbox.get(timeout=30.0)
        places.append(done.made.pieces[0].ctypes.data)
        actor.core.next = [actions.Published("round", {}, 0)]
        actor.perform(actor.merged(done.event, done.version, done.made, merging.done(done), 0.0))
        del done  # a test that holds a version keeps its memory from being written
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
    offer = SignedOffer(model.read(0, (np.ones(2, np.float32),)))
    merging.merge(actions.Merge(round_id, 1, (given,)), [(given, offer)])
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
