"""The syncer's thread with links instead of learners: offers and merges that fail; what then is merged."""

import threading

import numpy as np
import pytest

from ddiloco.outer.fragments import fragment
from ddiloco.outer.global_model import GlobalModel
from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report, Watermark
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.telemetry import records
from ddiloco.workers.syncer_worker import SyncerWorker
from tests.remote.ends import until
from tests.workers.syncer_desk import DIRECT, THETA, TIMEOUT, Desk, Peer, full


@pytest.fixture
def desk():
    made = []

    def make(*arguments):
        made.append(Desk(*arguments))
        return made[-1]

    yield make
    for one in made:
        assert one.worker.stop(TIMEOUT)


def test_a_restarted_syncer_ends_without_learners_that_cannot_join():
    layout = fragment({name: tensor.shape for name, tensor in THETA.items()}, 1)
    policy = SyncPolicy(3, num_fragments=1, interval=2, overlap=1, quorum=None, silence_timeout=10 * TIMEOUT)
    core = SyncerCore(policy, 2, SyncerState((1,), (2,), ((0, 1), (1, 4), (2, 1))))
    worker = SyncerWorker(core, GlobalModel(layout, THETA, DIRECT, 3), lambda record: None)
    for lost in core.lost_for_good(lambda learner: learner > 0):
        worker.send(lost)
    worker.start()
    peer = Peer(0, worker)
    worker.connect(0, 2, peer)
    worker.send(events.LearnerJoined(0, 2, 2, (1,)))
    assert worker.ended.wait(TIMEOUT)
    assert worker.core.finished
    assert worker.stop(TIMEOUT)


def test_a_round_merges_every_peer_and_sends_the_result_to_all(desk):
    it = desk(3)
    it.offers(full(1.0), full(2.0), full(6.0))
    for peer in it.peers:
        update = peer.next(events.UpdateArrived)
        assert (update.event.fragment, update.event.version, update.event.step) == (0, 1, 2)
        np.testing.assert_allclose(update.fragments[0][0], full(3.0), rtol=1e-6)
    assert it.worker.ended.wait(TIMEOUT)
    assert it.worker.failure is None
    it.is_merged()
    assert it.commits == [2]
    [values] = it.noted("round")
    assert values["learners"] == [0, 1, 2]
    assert values["merge_seconds"] > 0.0 and "disk_seconds" not in values  # nothing was to be durable
    assert (values["merging"], values["inbox"] >= 0) == (0, True)
    assert values["outer_gradient_norm"] == pytest.approx(
        np.linalg.norm(THETA["layers/0/kernel"] - full(3.0)), rel=1e-6
    )
    moved = [(r.learner, r.sent, r.received) for r in it.taken if isinstance(r, records.Transferred)]
    assert sorted(moved) == [(m, 24, 0) for m in range(3)]  # links record what goes the other way


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (full(np.nan), "layers/0/kernel holds values that are not finite or beyond 1e19"),
        (
            full(1.0).astype(np.float64),
            "array 0 of fragment 0 in f32 is float64[2, 3], but must be float32[2, 3]",
        ),
        (ConnectionError("link down"), "link down"),
    ],
    ids=["nan", "float64", "broken"],
)
def test_what_cannot_be_used_is_dropped_and_counted_and_the_others_are_merged(desk, answer, reason):
    it = desk(3)
    it.offers(full(2.0), answer, full(4.0))
    for peer in it.peers:  # also to the one that was left out
        np.testing.assert_allclose(peer.next(events.UpdateArrived).fragments[0][0], full(3.0), rtol=1e-6)
    it.is_merged()
    assert it.noted("drop") == [{"learner": 1, "reason": reason}]
    assert [values["learners"] for values in it.noted("round")] == [[0, 2]]
    assert it.worker.failure is None


@pytest.mark.parametrize("answer", [full(np.nan), ConnectionError("link down")], ids=["nan", "broken"])
def test_a_peer_whose_offer_failed_is_asked_again_once_it_speaks_while_the_round_waits(desk, answer):
    it = desk(2)
    it.offers(None, answer)
    it.peers[1].report()
    round_id = it.peers[1].is_asked()
    it.peers[1].offer(round_id, full(4.0))
    it.peers[0].offer(round_id, full(2.0))
    np.testing.assert_allclose(it.peers[1].next(events.UpdateArrived).fragments[0][0], full(3.0), rtol=1e-6)
    it.is_merged()
    assert [values["learners"] for values in it.noted("round")] == [[0, 1]]
    assert [values["learner"] for values in it.noted("drop")] == [1]


def test_of_a_merge_that_is_empty_nothing_is_committed_nor_sent_and_the_next_one_makes_the_version(desk):
    it = desk(2, 4)
    it.offers(full(1.0), full(3.0), tokens=0)
    until(lambda: it.noted("round_refused"), "the end of the merge")
    for peer in it.peers:
        peer.report()
    for peer in it.peers:
        peer.offer(peer.is_asked(), full(5.0))
    for peer in it.peers:
        update = peer.next(events.UpdateArrived)
        assert update.event.version == 1
        np.testing.assert_allclose(update.fragments[0][0], full(5.0), rtol=1e-6)
    it.is_merged()
    assert it.commits == [2]
    assert it.noted("round_refused") == [{"step": 2, "fragment": 0, "left_out": [0, 1]}]
    assert len(it.noted("round")) == 1


def test_a_learner_counts_once_it_is_ready_not_when_it_joins(desk):
    d = desk(1)
    [peer] = d.peers
    peer.is_asked()
    assert peer.counted == [1]
    d.worker.send(events.LearnerLost(0, 1, "connection lost"))
    d.worker.connect(0, 2, peer)
    d.worker.send(events.LearnerJoined(0, 2, 9, (7,), (5,)))  # of versions that there never were
    peer.next(events.Welcomed)
    assert peer.counted == [1]
    d.worker.send(events.LearnerReady(0, 2, 0, (0,)))
    peer.is_asked()
    assert peer.counted == [1, 2]


def test_a_merge_that_raises_ends_the_syncer_with_the_failure_told(desk, monkeypatch):
    it = desk(2)

    def merge(*arguments):
        raise MemoryError("no room for the merge")

    monkeypatch.setattr(it.model, "merge", merge)
    it.offers(full(1.0), full(2.0))
    assert it.worker.ended.wait(TIMEOUT)
    assert it.worker.failure.startswith("MemoryError: no room for the merge\nTraceback")
    assert not it.worker.core.finished
    assert it.commits == []


def test_stopping_waits_for_no_learner(desk):
    it = desk(2)
    it.offers(full(1.0), None)
    assert it.worker.stop(TIMEOUT)
    assert (it.worker.failure, it.worker.core.finished, it.commits) == (None, False, [])


class Disk:
    """A disk that counts its writes; none is done before it is let go."""

    def __init__(self):
        self.remembered, self.writes, self.go = [], 0, threading.Event()

    def commit(self, merged, model, watermarks, delays):
        return True

    def remember(self, incarnations):
        assert self.go.wait(TIMEOUT)
        self.remembered += incarnations
        self.writes += 1
        return True


def test_a_burst_of_joins_costs_few_writes_and_leaves_no_links_behind(desk):
    it = desk(1)
    [peer] = it.peers
    peer.is_asked()
    it.worker._durable = disk = Disk()
    for learner in range(1, 3001):
        it.worker.connect(learner, 1, peer)
        it.worker.send(events.LearnerJoined(learner, 1))
    disk.go.set()
    for number in range(1, 3001):
        assert peer.next(events.Welcomed).event.incarnation == 1
        assert len(disk.remembered) >= number, "durable before it is answered"
    assert disk.writes <= 5
    peer.over = True  # as a connection that has ended
    for learner in range(3001):
        it.worker.send(events.LearnerLost(learner, 1, "it left"))
    until(lambda: len(it.worker._links) == 0, "the links to be forgotten")


class FullDisk:
    """Refuses to note who joined until there is room."""

    def __init__(self):
        self.room, self.asked = False, []

    def remember(self, incarnations):
        self.asked.append(tuple(incarnations))
        return self.room


def test_who_joined_while_the_disk_was_full_is_noted_with_the_next_join(desk):
    it = desk(1)
    [peer] = it.peers
    peer.is_asked()
    it.worker._durable = disk = FullDisk()
    it.worker.connect(1, 1, peer)
    for disk.room in (False, True, True):
        it.worker.send(events.LearnerJoined(1, 1))
        if not disk.room:
            peer.next(events.Welcomed)
    until(lambda: len(disk.asked) == 2, "the next join to be noted")
    assert it.worker.stop(TIMEOUT)
    assert disk.asked == [((1, 1),)] * 2


@pytest.mark.parametrize(
    "message",
    [
        events.LearnerReady(0, 1, -5, ()),
        events.LearnerReady(0, 1, None, None),
        events.StepReported(Report(0, 1, 5, None)),
        events.OfferFailed(None, 0, 1, "x"),
    ],
    ids=str,
)
def test_no_message_of_a_learner_ends_the_syncer(desk, message):
    it = desk(2)
    it.worker.send(message)
    it.offers(full(1.0), full(3.0))
    for peer in it.peers:
        assert peer.next(events.UpdateArrived).event.version == 1
    assert it.worker.failure is None


TWO = {"layers/0/kernel": full(0.0), "layers/1/kernel": full(0.0)}


class SlowDisk:
    """A disk that keeps one fragment waiting until it is released, and knows what it holds."""

    def __init__(self, slow):
        self.slow, self.held = slow, []
        self.begun, self.free = threading.Event(), threading.Event()

    def commit(self, merged, model, watermarks, delays):
        if merged.fragment == self.slow:
            self.begun.set()
            assert self.free.wait(TIMEOUT)
        self.held.append((merged.fragment, model.state(merged.fragment).version))
        return True

    def remember(self, incarnations):
        pass


@pytest.mark.parametrize("stopped", [False, True])
def test_a_fragment_waits_for_its_own_commit_alone(stopped):
    disk = SlowDisk(slow=0)
    policy = SyncPolicy(1, num_fragments=2, interval=4, overlap=4, quorum=1, gamma=0.0)
    layout = fragment({name: tensor.shape for name, tensor in TWO.items()}, 2)
    worker = SyncerWorker(
        SyncerCore(policy, 5), GlobalModel(layout, TWO, DIRECT, 1), lambda r: None, lambda *a: None, disk
    )
    peer = Peer(0, worker)
    worker.start()
    worker.connect(0, 1, peer)
    worker.send(events.LearnerJoined(0, 1))
    peer.next(events.Welcomed)
    worker.send(events.LearnerReady(0, 1, 0, (0, 0)))
    for step in range(1, 5):
        worker.send(events.StepReported(Report(0, 1, step, (FragmentCounters(0, step, 10 * step),) * 2)))
    rounds = [peer.next(events.OfferAsked).event.round for _ in range(2)]
    for which in sorted(rounds, key=lambda r: r.fragment, reverse=True):
        made = Contribution(0, 1, which.fragment, version=0, step=4, steps=4, tokens=40)
        worker.take_offer(events.FragmentArrived(which, made), (full(1.0 + which.fragment),))
    update = peer.next(events.UpdateArrived)
    assert (update.event.fragment, update.event.version) == (1, 1)
    np.testing.assert_array_equal(update.fragments[0][0], full(2.0))
    assert disk.held == [(1, 1)] and peer.inbox.empty() and worker.core.versions == (0, 1)
    assert disk.begun.wait(TIMEOUT)
    if stopped:  # what was merged becomes durable, and is noted
        assert not worker.stop(0.0)
        disk.free.set()
        assert worker.stop(TIMEOUT)
    else:
        disk.free.set()
        update = peer.next(events.UpdateArrived)
        assert (update.event.fragment, update.event.version) == (0, 1)
        assert worker.stop(TIMEOUT)
    assert disk.held == [(1, 1), (0, 1)] and worker.core.versions == (1, 1)
    assert worker.failure is None


def test_other_threads_are_told_how_far_a_learner_s_work_is_merged_or_may_be(desk):
    one = desk(2)
    assert one.worker.furthest(0) == Watermark()
    round_id = one.peers[0].is_asked()
    upto = Watermark(1, 2, "[2]")
    contribution = Contribution(0, 1, fragment=0, version=0, step=2, steps=2, tokens=10, upto=upto)
    one.peers[0].report()
    one.worker.take_offer(events.FragmentArrived(round_id, contribution), (full(1.0),))
    until(lambda: one.worker.furthest(0) == upto, "the offer, which may be merged")
    assert (one.worker.furthest(0).position, one.worker.furthest(1)) == ("[2]", Watermark())
    assert one.worker.stop(TIMEOUT)
    assert one.worker.furthest(0) == upto, "also once the thread has ended"
