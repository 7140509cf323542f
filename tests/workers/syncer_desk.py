"""A running SyncerWorker with links instead of learners, for tests of what it does with their offers."""

import queue

import numpy as np

from ddiloco.outer.fragments import fragment
from ddiloco.outer.global_model import GlobalModel
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.telemetry import records
from ddiloco.workers.syncer_worker import SyncerWorker
from tests.remote.ends import until

THETA = {"layers/0/kernel": np.arange(6, dtype=np.float32).reshape(2, 3)}
DIRECT = OuterConfig(merge="direct", optimizer="direct")
TIMEOUT = 30.0


class Peer:
    """A learner as the syncer sees it: what it was sent, and what it offers."""

    def __init__(self, learner, worker):
        self.learner, self._worker = learner, worker
        self.inbox, self.counted = queue.SimpleQueue(), []

    def deliver(self, delivery):
        self.inbox.put(delivery)

    def begun(self, incarnation):
        self.counted.append(incarnation)

    def report(self, step=2):
        counters = (FragmentCounters(version=0, steps=step, tokens=10),)
        self._worker.send(events.StepReported(Report(self.learner, 1, step, counters)))

    def is_asked(self):
        """Waits for the question; what it is to offer for."""
        asked = self.next(events.OfferAsked).event
        assert (asked.version, asked.clock) == (0, 2)
        return asked.round

    def offer(self, round_id, arrays, tokens=10):
        """Arrays as if they had come over a link, or the error with which that ended."""
        if isinstance(arrays, Exception):
            self._worker.send(events.OfferFailed(round_id, self.learner, 1, str(arrays)))
            return
        contribution = Contribution(self.learner, 1, fragment=0, version=0, step=2, steps=2, tokens=tokens)
        self._worker.take_offer(events.FragmentArrived(round_id, contribution), (arrays,))

    def next(self, kind):
        delivery = self.inbox.get(timeout=TIMEOUT)
        assert isinstance(delivery, kind) or isinstance(delivery.event, kind), delivery
        return delivery


class Desk:
    """A running SyncerWorker with live peers, all of them the quorum of one round at step 2."""

    def __init__(self, num_learners, total_steps=2):
        policy = SyncPolicy(num_learners, num_fragments=1, interval=2, overlap=1, quorum=None)
        layout = fragment({name: tensor.shape for name, tensor in THETA.items()}, 1)
        self.model = GlobalModel(layout, THETA, DIRECT, num_learners)
        self.taken, self.commits = [], []
        core = SyncerCore(policy, total_steps)
        self.worker = SyncerWorker(
            core, self.model, self.taken.append, lambda step, fragments: self.commits.append(step)
        )
        self.peers = [Peer(m, self.worker) for m in range(num_learners)]
        self.worker.start()
        for peer in self.peers:
            self.worker.connect(peer.learner, 1, peer)
            self.worker.send(events.LearnerJoined(peer.learner, 1))
            np.testing.assert_array_equal(
                peer.next(events.Welcomed).fragments[0][0], THETA["layers/0/kernel"]
            )
            self.worker.send(events.LearnerReady(peer.learner, 1, 0, (0,)))

    def offers(self, *arrays, tokens=10):
        """Every peer was asked, has come to the step, and offers what is not None, in order."""
        for peer, given in zip(self.peers, arrays, strict=True):
            round_id = peer.is_asked()
            peer.report()
            if given is not None:
                peer.offer(round_id, given, tokens)

    def is_merged(self):
        """Waits until the first round is over: its update comes before it is recorded."""
        until(lambda: self.commits, "the end of the round")

    def noted(self, name):
        return [r.values for r in self.taken if isinstance(r, records.Noted) and r.name == name]


def full(value):
    return np.full((2, 3), value, np.float32)
