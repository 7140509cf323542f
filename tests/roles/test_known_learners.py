"""Who has joined is noted on the disk, also after that was full."""

import threading

import numpy as np

from ddiloco.outer.fragments import fragment
from ddiloco.outer.global_model import GlobalModel
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.protocol import events
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.roles.syncer_worker import SyncerWorker

THETA = {"layers/0/kernel": np.arange(6, dtype=np.float32).reshape(2, 3)}
DIRECT = OuterConfig(merge="direct", optimizer="direct")
PATIENCE = 30.0


class Link:
    """Says that something was sent over it."""

    def __init__(self):
        self.heard = threading.Event()

    def deliver(self, delivery):
        self.heard.set()

    def begun(self, incarnation):
        pass


class FullDisk:
    """Refuses to note who joined until there is room."""

    def __init__(self):
        self.room, self.asked = False, []

    def remember(self, incarnations):
        self.asked.append(tuple(incarnations))
        return self.room


def test_who_joined_while_the_disk_was_full_is_noted_with_the_next_join():
    policy = SyncPolicy(1, num_fragments=1, interval=2, overlap=1, quorum=None)
    layout = fragment({name: tensor.shape for name, tensor in THETA.items()}, 1)
    disk = FullDisk()
    worker = SyncerWorker(
        SyncerCore(policy, 2), GlobalModel(layout, THETA, DIRECT, 1), lambda record: None, durable=disk
    )
    link = Link()
    worker.start()
    worker.connect(0, 1, link)
    for room in (False, True, True):
        disk.room = room
        worker.send(events.LearnerJoined(0, 1))
        if not room:
            assert link.heard.wait(PATIENCE)
    assert worker.stop(PATIENCE)
    assert disk.asked == [((0, 1),), ((0, 1),)]
