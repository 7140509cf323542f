"""The syncer's memory by the number of learners: peak resident bytes of its process with 2 and with 16."""

from __future__ import annotations

import pathlib
import tempfile
import threading
from multiprocessing.connection import Connection

import numpy as np

from ddiloco.disk.durable import DurableState
from ddiloco.outer.encoding import wire_format
from ddiloco.outer.fragments import FragmentLayout, fragment
from ddiloco.outer.global_model import GlobalModel
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.protocol import events
from ddiloco.protocol.messages import RoundId
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.remote.syncer.server import SyncerServer
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.terms import Terms
from ddiloco.roles.syncer_worker import SyncerWorker
from ddiloco.run.needs import merging_needs
from ddiloco.training import platform
from ddiloco.training.memory import return_freed
from experiments.bench.measuring import row
from experiments.bench.processes import CONFIG, PATIENCE, LearnerEnd, another_process, heard

LEARNERS = (2, 16)
NUM_FRAGMENTS, INTERVAL = 24, 24


def run(quick: bool = False) -> list[dict]:
    """Measures a syncer process of a model of 256 MiB (`quick`: 12 MiB), P = 24, through three rounds of each
    fragment, with learners that send real fragments over a real wire and take all updates.

    Returns:
      One row, in MB over what the process has before it has a model: `measured` with M = 16, `reference` with
      M = 2, `limit` the model's bytes. `model_mb` too, and `needed_mb`, what --dry_run says with M = 16.
    """
    width = 256 if quick else 1672
    few, many = (_peak(learners, width) / 1e6 for learners in LEARNERS)
    layout = _layout(width)
    size = sum(layout.bytes) / 1e6
    overlap, fragments = SyncPolicy().overlap, range(NUM_FRAGMENTS)
    needed = merging_needs(layout, OuterConfig(merge="rda"), overlap, LEARNERS[1], fragments).most / 1e6
    return [row("memory", many, few, size, "MB", model_mb=size, needed_mb=needed)]


def _shapes(width: int) -> dict[str, tuple[int, int]]:
    return {f"layers/{i}/kernel": (width, width) for i in range(NUM_FRAGMENTS)}


def _layout(width: int) -> FragmentLayout:
    """One matrix a fragment."""
    return fragment(_shapes(width), NUM_FRAGMENTS, "balanced")


def _terms(layout: FragmentLayout, learners: int) -> Terms:
    formats = [wire_format(layout, p, "f32") for p in range(NUM_FRAGMENTS)]
    return Terms("memory", "memory", learners, learners, formats, formats, formats, PATIENCE)


def _peak(learners: int, width: int) -> int:
    """Bytes that the syncer's process had at most, over those that it had without a model."""
    with another_process(_syncer, learners, width) as pipe:
        address, terms = heard(pipe), _terms(_layout(width), learners)
        ends = [LearnerEnd(address, m, terms) for m in range(learners)]
        threads = [threading.Thread(target=_work, args=(end, width), daemon=True) for end in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10 * PATIENCE)
        for end in ends:
            end.close()
        pipe.send(None)
        return heard(pipe)


def _work(end: LearnerEnd, width: int) -> None:
    """A learner's three rounds of each fragment, each step after the update of the one before it.

    The same arrays, which cost the learners' process nothing, go out each time.
    """
    end.join()
    versions = [0] * NUM_FRAGMENTS
    end.send(events.LearnerReady(end.learner, 1, 0, tuple(versions)))
    arrays = (np.full((width, width), 0.5, np.float32),)
    for step in range(1, 3 * INTERVAL + 1):
        due = step % INTERVAL
        before = versions[due]
        end.report(step, versions)
        end.offer(RoundId(step, due), before, arrays)
        while versions[due] == before:
            event = end.update()
            versions[event.fragment] = event.version


def _syncer(pipe: Connection, learners: int, width: int) -> None:
    """The process that is measured."""
    platform.prepare(cache=False)
    layout = _layout(width)
    before = _resident("VmRSS")
    theta = {name: np.ones(shape, np.float32) for name, shape in _shapes(width).items()}
    model = GlobalModel(layout, theta, OuterConfig(merge="rda"), learners)
    del theta
    policy = SyncPolicy(num_learners=learners, num_fragments=NUM_FRAGMENTS, interval=INTERVAL, quorum=None)
    with tempfile.TemporaryDirectory(prefix="ddiloco-bench-") as folder:
        ignore = lambda record: None  # noqa: E731
        durable = DurableState(pathlib.Path(folder), layout, ignore, threading.Event())
        durable.begin(model)
        core = SyncerCore(policy, 3 * INTERVAL)
        worker = SyncerWorker(core, model, ignore, lambda step, fragments: None, durable)
        terms = _terms(layout, learners)
        server = SyncerServer(
            terms, Security(), CONFIG, worker.connect, worker.send, worker.take_offer, ignore
        )
        port = server.start("127.0.0.1:0")
        model.compile()
        return_freed()
        server.open()
        pipe.send(f"127.0.0.1:{port}")
        server.gather(PATIENCE, threading.Event())
        worker.start()
        pipe.recv()
        peak = _resident("VmHWM") - before
    pipe.send(peak)


def _resident(field: str) -> int:
    """Bytes of this process, as the system has them."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}")
