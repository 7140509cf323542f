"""Whether a learner steps on while a snapshot of it is taken and written: the time of its steps."""

from __future__ import annotations

import pathlib
import statistics
import tempfile
import threading
import time

import jax
import jax.numpy as jnp

from ddiloco.storage.snapshots.store import PartWriter
from ddiloco.workers.exchange import SnapshotBegun
from ddiloco.workers.snapshots.messages import PartWritten, SnapshotMessage
from ddiloco.workers.snapshots.recording import LearnerRecording
from experiments.bench.bench_model import (
    SteppingLearner,
    assembly_of,
    initial_fragments,
    training_arrays,
)
from experiments.bench.measuring import medians, row


def run(quick: bool = False) -> list[dict]:
    """Measures one learner of the model of `bench learner`, with a snapshot under way and without, in turn.

    Returns:
      Two rows. `snapshot`, milliseconds of a step: measured, the mean from the word that a snapshot has begun
      until its part is on the disk; reference, the mean without one; limit, the latter and the bare copy of
      as many bytes as the state. Also `steps` (measured), `part_mb`, `seconds` (of a snapshot, the median)
      and `slowest_step_ratio`, the longest step in a snapshot over the longest of as many without, the
      median. `snapshot_copy`, milliseconds that recording the state takes, the copies complete; reference and
      limit: the bare copy.
    """
    assembly = assembly_of(1, quick)
    equipment, fragments = assembly.own_equipment(0), initial_fragments(assembly)
    plain: list[float] = []
    during: list[float] = []
    lengths, worst = [], []
    with tempfile.TemporaryDirectory(prefix="ddiloco-bench-") as folder:
        writer, syncer = PartWriter(pathlib.Path(folder)), _SyncerEnd()
        learner = SteppingLearner(equipment, fragments, LearnerRecording(0, writer, syncer))
        try:
            learner.gaps(3)
            for number in range(1, 3 if quick else 13):
                syncer.written.clear()
                begun = time.perf_counter()
                learner.worker.inbox.put(SnapshotBegun(number, ()))
                taken = learner.gaps_until(syncer.written.is_set)
                lengths.append(time.perf_counter() - begun)
                alone = learner.gaps(len(taken))
                worst.append(max(taken) / max(alone))
                during += taken
                plain += alone
        finally:
            learner.end()
            writer.close(60.0)
    if syncer.problem:
        raise RuntimeError(syncer.problem)
    arrays = training_arrays(equipment, fragments)
    state, copy = arrays.state()[0], jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
    candidates = {"recorded": lambda: arrays.state()[0], "bare": lambda: copy(state)}
    copies = medians(candidates, 2 if quick else 14, warm_up=1)
    recorded, bare, step = 1e3 * copies["recorded"], 1e3 * copies["bare"], 1e3 * statistics.mean(plain)
    more = {"steps": len(during), "part_mb": syncer.bytes / 1e6, "seconds": statistics.median(lengths)}
    more["slowest_step_ratio"] = statistics.median(worst)
    return [
        row("snapshot", 1e3 * statistics.mean(during), step, step + bare, "ms a step", **more),
        row("snapshot_copy", recorded, bare, bare, "ms"),
    ]


class _SyncerEnd:
    """In the syncer's place: notes what the learner's snapshot sends."""

    def __init__(self) -> None:
        self.written = threading.Event()
        self.bytes = 0  # of the newest part
        self.problem = ""

    def __call__(self, message: SnapshotMessage) -> None:
        if isinstance(message, PartWritten):
            self.problem = self.problem or message.problem
            if message.files is not None:
                self.bytes = sum(size for size, _ in message.files.files.values())
            self.written.set()
