"""The syncer's memory by the number of learners: peak resident bytes of its process with 2 and with 16."""

from __future__ import annotations

import multiprocessing
import pathlib
import queue
import tempfile
import threading
from multiprocessing.connection import Connection

import numpy as np

from ddiloco.disk.durable import DurableState
from ddiloco.outer.encoding import wire_format
from ddiloco.outer.fragments import FragmentLayout, fragment, take
from ddiloco.outer.global_model import GlobalModel
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.remote.learner.client import SyncerClient
from ddiloco.remote.syncer.server import SyncerServer
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.terms import Terms
from ddiloco.roles.shelf import Shelf
from ddiloco.roles.syncer_worker import SyncerWorker
from ddiloco.roles.transfer import Offer
from ddiloco.settings.remote import RemoteConfig
from ddiloco.training import platform
from experiments.bench.row import row

PATIENCE = 120.0
LEARNERS = (2, 16)
NUM_FRAGMENTS, INTERVAL = 24, 24


def run(quick: bool = False) -> list[dict]:
    """Measures a syncer process of a model of 256 MiB (`quick`: 12 MiB), P = 24, through three rounds of each
    fragment, with learners that send real fragments over a real wire and take all updates.

    Returns:
      One row, in MB over what the process has before it has a model: `measured` with M = 16, `reference` with
      M = 2, `limit` the model's bytes. `model_mb` too.
    """
    width = 256 if quick else 1672
    peaks = {learners: _peak(learners, width) / 1e6 for learners in LEARNERS}
    few, many = (peaks[learners] for learners in LEARNERS)
    size = sum(_layout(width).bytes) / 1e6
    return [row("memory", many, few, size, "MB", model_mb=size)]


def _layout(width: int) -> FragmentLayout:
    shapes = {f"layers/{i}/kernel": (width, width) for i in range(NUM_FRAGMENTS)}
    return fragment(shapes, NUM_FRAGMENTS, "balanced")


def _terms(layout: FragmentLayout, learners: int) -> Terms:
    formats = [wire_format(layout, p, "f32") for p in range(NUM_FRAGMENTS)]
    return Terms("memory", "memory", learners, formats, formats, PATIENCE)


def _policy(learners: int) -> SyncPolicy:
    return SyncPolicy(num_learners=learners, num_fragments=NUM_FRAGMENTS, interval=INTERVAL, quorum=None)


def _peak(learners: int, width: int) -> int:
    """Bytes that the syncer's process had at most, over those that it had without a model."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_syncer, args=(theirs, learners, width), daemon=True)
    process.start()
    try:
        assert ours.poll(PATIENCE)
        address = ours.recv()
        layout = _layout(width)
        ends = [_Learner(address, m, layout, learners) for m in range(learners)]
        threads = [threading.Thread(target=end.work, daemon=True) for end in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10 * PATIENCE)
        for end in ends:
            end.client.finish(1.0)
        ours.send(None)
        assert ours.poll(PATIENCE)
        return ours.recv()
    finally:
        process.kill()
        process.join()


class _Learner:
    """Steps without training: the same arrays, which cost the learners' process nothing, go out each time."""

    def __init__(self, address: str, learner: int, layout: FragmentLayout, learners: int) -> None:
        self.inbox, self.shelf = queue.SimpleQueue(), Shelf()
        self._learner, self._layout = learner, layout
        config = RemoteConfig(gather=PATIENCE)
        self.client = SyncerClient(address, learner, 1, _terms(layout, learners), Security(), config)
        self.client.attach(self)
        self.client.start()

    def work(self) -> None:
        """Three rounds of each fragment, each step after the update of the one before it."""
        send = self.client.outbox.send
        send(events.LearnerJoined(self._learner, 1))
        assert isinstance(self.inbox.get(timeout=PATIENCE).event, events.Welcomed)
        versions = [0] * NUM_FRAGMENTS
        send(events.LearnerReady(self._learner, 1, 0, tuple(versions)))
        arrays = [
            tuple(np.full(shape, 0.5, np.float32) for shape in self._layout.piece_shapes(p)) for p in range(1)
        ]
        for step in range(1, 3 * INTERVAL + 1):
            due = step % INTERVAL
            contribution = Contribution(self._learner, 1, due, versions[due], step, 1, 10)
            self.shelf.put(contribution, Offer(arrays[0]))
            counters = tuple(FragmentCounters(version, 1, 10) for version in versions)
            send(events.StepReported(Report(self._learner, 1, step, counters)))
            while versions[due] < contribution.version + 1:
                delivery = self.inbox.get(timeout=PATIENCE)
                if isinstance(delivery.event, events.UpdateArrived):
                    versions[delivery.event.fragment] = delivery.event.version


def _syncer(pipe: Connection, learners: int, width: int) -> None:
    """The process that is measured."""
    platform.prepare(cache=False)
    layout = _layout(width)
    before = _resident("VmRSS")
    theta = {f"layers/{i}/kernel": np.ones((width, width), np.float32) for i in range(NUM_FRAGMENTS)}
    assert all(len(take(layout, p, theta)) == 1 for p in range(NUM_FRAGMENTS))
    model = GlobalModel(layout, theta, OuterConfig(merge="rda"), learners)
    del theta
    with tempfile.TemporaryDirectory(prefix="ddiloco-bench-") as folder:
        ignore = lambda record: None  # noqa: E731
        durable = DurableState(pathlib.Path(folder), layout, ignore, threading.Event())
        durable.begin(model)
        core = SyncerCore(_policy(learners), 3 * INTERVAL)
        worker = SyncerWorker(core, model, ignore, lambda step, fragments: None, durable)
        server = SyncerServer(
            _terms(layout, learners), Security(), RemoteConfig(), worker.connect, worker.send, ignore
        )
        port = server.start("127.0.0.1:0")
        model.compile()
        server.open()
        pipe.send(f"127.0.0.1:{port}")
        server.gather(PATIENCE, threading.Event())
        worker.start()
        pipe.recv()
        pipe.send(_resident("VmHWM") - before)


def _resident(field: str) -> int:
    """Bytes of this process, as the system has them."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}")
