"""Whether a learner steps on while a snapshot of it is taken and written: the time of its steps."""

from __future__ import annotations

import pathlib
import statistics
import tempfile
import threading
import time

import jax
import jax.numpy as jnp
from etils import epath

from ddiloco.storage.learner_state import LearnerState, LearnerStates
from ddiloco.workers.checkpointing import Checkpointing
from ddiloco.workers.exchange import CheckpointAsked
from ddiloco.workers.learner_worker import Checkpoints
from ddiloco.workers.resuming import about_states
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
      Two rows. `snapshot`, milliseconds of a step: measured, the mean from where a checkpoint is asked for
      until it is on the disk; reference, the mean without one; limit, the latter and the bare copy of
      as many bytes as the state. Also `steps` (measured), `part_mb`, `seconds` (of a snapshot, the median)
      and `slowest_step_ratio`, the longest step in a snapshot over the longest of as many without, the
      median. `snapshot_copy`, milliseconds that copying the state takes, the copies complete; reference and
      limit: the bare copy.
    """
    assembly = assembly_of(1, quick)
    equipment, fragments = assembly.own_equipment(0), initial_fragments(assembly)
    plain: list[float] = []
    during: list[float] = []
    lengths, worst = [], []
    with tempfile.TemporaryDirectory(prefix="ddiloco-bench-") as folder:
        disk = _Disk(pathlib.Path(folder) / "learners" / "0")
        keeper = Checkpointing(disk.keep, 0.0, folder, print, disk.written)
        about = about_states(assembly.experiment, assembly.layout, "")
        learner = SteppingLearner(equipment, fragments, Checkpoints(keeper, about))
        try:
            learner.gaps(3)
            for number in range(1, 3 if quick else 13):
                disk.done.clear()
                begun = time.perf_counter()
                learner.worker.inbox.put(CheckpointAsked(number))
                taken = learner.gaps_until(disk.done.is_set)
                lengths.append(time.perf_counter() - begun)
                alone = learner.gaps(len(taken))
                worst.append(max(taken) / max(alone))
                during += taken
                plain += alone
        finally:
            learner.end()
    if disk.problem:
        raise RuntimeError(disk.problem)
    arrays = training_arrays(equipment, fragments)
    state, copy = arrays.state()[0], jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
    candidates = {"recorded": lambda: arrays.state()[0], "bare": lambda: copy(state)}
    copies = medians(candidates, 2 if quick else 14, warm_up=1)
    recorded, bare, step = 1e3 * copies["recorded"], 1e3 * copies["bare"], 1e3 * statistics.mean(plain)
    more = {"steps": len(during), "part_mb": disk.bytes / 1e6, "seconds": statistics.median(lengths)}
    more["slowest_step_ratio"] = statistics.median(worst)
    return [
        row("snapshot", 1e3 * statistics.mean(during), step, step + bare, "ms a step", **more),
        row("snapshot_copy", recorded, bare, bare, "ms"),
    ]


class _Disk:
    """Keeps checkpoints, and notes what became of the newest."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.done = threading.Event()
        self.bytes = 0
        self.problem = ""
        self._states = LearnerStates(epath.Path(folder))

    def keep(self, state: LearnerState, number: int) -> None:
        """As a Checkpointing wants it."""
        states = self._states.of_snapshot(number)
        states.keep(state)
        self.bytes = sum(path.stat().length for path in states.folder.iterdir())

    def written(self, number: int, result: LearnerState | str) -> None:
        """Likewise."""
        if isinstance(result, str):
            self.problem = result
        self.done.set()
