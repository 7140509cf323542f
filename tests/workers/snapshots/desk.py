"""A SnapshotTaker that a test speaks to in the place of its syncer and learners."""

import pathlib
import queue

import numpy as np

from ddiloco.outer.global_model import FragmentState
from ddiloco.protocol import events
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.settings.saving import SnapshotConfig
from ddiloco.storage.snapshots.parts import learner_part
from ddiloco.storage.snapshots.store import SnapshotPart, SnapshotStore
from ddiloco.telemetry import records
from ddiloco.workers.snapshots.messages import PartWritten, StateRecorded
from ddiloco.workers.snapshots.taking import SnapshotTaker

PATIENCE = 30.0


class Desk:
    """A SnapshotTaker between a syncer's core with two learners and a folder."""

    def __init__(self, folder: pathlib.Path, patience=None, steps_in_flight=0, **settings):
        self.folder, self.records, self.inbox = folder, [], queue.SimpleQueue()
        self.core = SyncerCore(SyncPolicy(num_learners=2, num_fragments=1, interval=4))
        for learner in (0, 1):
            self.core.handle(events.LearnerJoined(learner, 1), 0.0)
            self.core.handle(events.LearnerReady(learner, 1, 0, (0,)), 0.0)
        config = SnapshotConfig(every=4, **settings)
        more = {"patience": patience, "steps_in_flight": steps_in_flight}
        self.taker = SnapshotTaker(folder, config, {"layout": "x"}, 0, self.inbox.put, self._record, **more)

    def _record(self, record):
        self.records.append(record)
        if isinstance(record, records.Flush):
            self.flushed_before = self.newest() is None
            record.done()

    def begin(self):
        piece = np.arange(3, dtype=np.float32)
        return self.taker.begin(self.core, [FragmentState(0, (piece,), (piece + 1,))], 0.0)

    def mark(self, learner, step=3, number=1):
        self.taker.take(StateRecorded(learner, 1, number, step, (0,)))

    def write(self, learner, number=1):
        part = SnapshotPart({"params/w": np.ones(2, np.float32)}, {"learner": learner})
        files = self.taker.writer.write(number, learner_part(learner), part).result(PATIENCE)
        self.taker.take(PartWritten(learner, number, files))

    def settle(self):
        """Takes what writing and completing tell, until the snapshot is over."""
        while not self.noted:
            self.taker.take(self.inbox.get(timeout=PATIENCE))

    @property
    def noted(self):
        return [(r.name, r.values) for r in self.records if isinstance(r, records.Noted)]

    @property
    def alarms(self):
        return [r.sentence for r in self.records if isinstance(r, records.Alarm)]

    def newest(self):
        return SnapshotStore(self.folder, 1).newest(lambda line: None)
