"""Whether a learner steps on while a snapshot of it is taken and written: the time of its steps."""

from __future__ import annotations

import itertools
import pathlib
import statistics
import tempfile
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp

from ddiloco.disk.snapshots.store import PartWriter
from ddiloco.outer.fragments import take
from ddiloco.roles.delivery import SnapshotBegun
from ddiloco.roles.learner_arrays import TrainingArrays
from ddiloco.roles.snapshots.messages import PartWritten, SnapshotMessage
from ddiloco.roles.snapshots.recording import LearnerRecording
from ddiloco.run.recipes import assembly_of
from experiments.bench.donation import SteppingLearner
from experiments.bench.learner import experiment
from experiments.bench.row import row


def run(quick: bool = False) -> list[dict]:
    """Measures one learner of the model of `bench learner`, with a snapshot under way and without, in turn.

    Returns:
      Two rows. `snapshot`, milliseconds of a step: measured, the mean from the word that a snapshot has begun
      until its part is on the disk; reference, the mean without one; limit, the latter and the bare copy of
      as many bytes as the state. Also `steps` (measured), `part_mb`, `seconds` (of a
      snapshot, the median) and `slowest_step_ratio`, the longest step in a snapshot over the longest of as
      many without, the median. `snapshot_copy`, milliseconds that recording the state takes, the copies
      complete; reference and limit: the bare copy.
    """
    assembly = assembly_of(experiment(1, quick))
    equipment = assembly.own_equipment(0)
    initial = assembly.initial_parameters()
    fragments = [take(assembly.layout, p, initial) for p in range(assembly.layout.num_fragments)]
    with tempfile.TemporaryDirectory(prefix="ddiloco-bench-") as folder:
        writer = PartWriter(pathlib.Path(folder))
        told = _Told()
        learner = SteppingLearner(equipment, fragments, LearnerRecording(0, writer, told))
        plain: list[float] = []
        during: list[float] = []
        lengths, worst = [], []
        try:
            learner.gaps(3)
            for number in range(1, 3 if quick else 13):
                told.written.clear()
                begun = time.perf_counter()
                learner.worker.inbox.put(SnapshotBegun(number, ()))
                taken = learner.gaps_until(told.written.is_set)
                lengths.append(time.perf_counter() - begun)
                alone = learner.gaps(len(taken))
                worst.append(max(taken) / max(alone))
                during += taken
                plain += alone
        finally:
            learner.end()
            writer.close(60.0)
    if told.problem:
        raise RuntimeError(told.problem)
    arrays = TrainingArrays(equipment)
    arrays.adopt(fragments)
    recorded, bare = _copies(arrays, 3 if quick else 15)
    step = statistics.mean(plain)
    return [
        row(
            "snapshot",
            1e3 * statistics.mean(during),
            1e3 * step,
            1e3 * (step + bare),
            "ms a step",
            steps=len(during),
            part_mb=sum(size for size, _ in told.files.values()) / 1e6,
            seconds=statistics.median(lengths),
            slowest_step_ratio=statistics.median(worst),
        ),
        row("snapshot_copy", 1e3 * recorded, 1e3 * bare, 1e3 * bare, "ms"),
    ]


class _Told:
    """What the learner would tell its syncer."""

    def __init__(self) -> None:
        self.written = threading.Event()
        self.files: dict[str, tuple[int, str]] = {}
        self.problem = ""

    def __call__(self, message: SnapshotMessage) -> None:
        if isinstance(message, PartWritten):
            self.problem = self.problem or message.problem
            self.files = dict(message.files.files) if message.files is not None else {}
            self.written.set()


def _copies(arrays: TrainingArrays, count: int) -> tuple[float, float]:
    """Seconds to record the state, and to copy as many bytes plainly; in turn, medians."""
    state: dict[str, Any] = arrays.state()[0]
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
    jax.block_until_ready(copy(state))
    seconds: tuple[list[float], list[float]] = ([], [])
    for i, work in itertools.product(range(count), (0, 1)):
        begun = time.perf_counter()
        jax.block_until_ready(arrays.state()[0] if work == 0 else copy(state))
        if i:
            seconds[work].append(time.perf_counter() - begun)
    return statistics.median(seconds[0]), statistics.median(seconds[1])
