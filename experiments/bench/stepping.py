"""Whether a learner steps on while its state is written as a snapshot, or given away to a peer."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import queue
import statistics
import tempfile
import threading
import time
import types
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from ddiloco.protocol import events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.remote.learner.donation import Donation, Recipient
from ddiloco.remote.learner.donor import Donor
from ddiloco.remote.learner.inner_format import InnerFormat
from ddiloco.remote.wire.security import Security
from ddiloco.storage.learner_state import LearnerState, LearnerStates
from ddiloco.telemetry.records import StepDone
from ddiloco.training import platform
from ddiloco.workers.checkpointing import Checkpointing
from ddiloco.workers.exchange import CheckpointAsked, EventDelivery, Leave
from ddiloco.workers.learner_arrays import Equipment
from ddiloco.workers.learner_worker import Checkpoints, LearnerWorker
from ddiloco.workers.resuming import about_states
from experiments.bench.learner import assembly_of, initial_fragments, training_arrays
from experiments.bench.measuring import TIMEOUT, another_process, medians, receive_from, row


class SteppingLearner:
    """A LearnerWorker that steps without a syncer."""

    def __init__(
        self, equipment: Equipment, fragments: list[Any], checkpoints: Checkpoints | None = None
    ) -> None:
        self._times: queue.SimpleQueue[float] = queue.SimpleQueue()
        policy = SyncPolicy(num_learners=1, num_fragments=len(fragments), interval=24)
        core = LearnerCore(0, 1, policy, None)
        nowhere = types.SimpleNamespace(waiting=0, send=lambda *offer: None)
        self.worker = LearnerWorker(
            core, equipment, lambda event, shard: None, nowhere, self._record, checkpoints=checkpoints
        )
        self.worker.start()
        zeros = (0,) * len(fragments)
        self.worker.inbox.put(EventDelivery(events.Welcomed(1, 0, zeros, zeros), fragments))

    def _record(self, record: Any) -> None:
        if isinstance(record, StepDone):
            self._times.put(time.perf_counter())

    def gaps(self, count: int) -> list[float]:
        """Seconds between the next `count` + 1 steps."""
        self._forget()
        times = [self._times.get(timeout=TIMEOUT) for _ in range(count + 1)]
        return [b - a for a, b in itertools.pairwise(times)]

    def gaps_until(self, over: Callable[[], bool]) -> list[float]:
        """Seconds between the steps that follow, the first from now on, until `over` holds after one."""
        self._forget()
        times = [time.perf_counter()]
        while not over():
            times.append(self._times.get(timeout=TIMEOUT))
        return [b - a for a, b in itertools.pairwise(times)]

    def end(self) -> None:
        """Ends its thread."""
        self.worker.inbox.put(Leave())
        self.worker.join(TIMEOUT)

    def _forget(self) -> None:
        """Steps until now do not count."""
        while not self._times.empty():
            self._times.get()


def run_snapshot(quick: bool = False) -> list[dict]:
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


def run_donation(quick: bool = False) -> list[dict]:
    """Measures one learner whose peer, another process, takes donation after donation (or none), in turn.

    Returns:
      One row, in steps a second: `measured` while donations go out back to back; `reference` the same learner
      without them; `limit` steps of the same arrays and nothing else, before. Also `donations` (in all),
      `donation_mb` and `slowest_step_ratio`: the longest gap between two steps with donations over without.
    """
    assembly = assembly_of(1, quick)
    equipment, fragments = assembly.own_equipment(0), initial_fragments(assembly)
    limit = _bare(equipment, fragments, 5 if quick else 40)
    inner = InnerFormat(equipment.program.inner_leaves)
    learner = SteppingLearner(equipment, fragments)
    donor = Donor(Security(), 20.0)
    port = donor.start("127.0.0.1")
    donor.attach(learner.worker.inbox, inner)
    leaves = [(leaf.shape, np.dtype(leaf.dtype).str) for leaf in equipment.program.inner_leaves]
    gaps: dict[bool, list[list[float]]] = {False: [], True: []}
    try:
        with another_process(_take, f"127.0.0.1:{port}", leaves, len(fragments)) as peer:
            learner.gaps(3)
            for donating in [False, True, True, False] * (1 if quick else 4):
                peer.send(donating)
                assert receive_from(peer) == donating
                gaps[donating].append(learner.gaps(5 if quick else 30))
            peer.send(None)
            taken = receive_from(peer)
    finally:
        learner.end()
        donor.stop()
    rate = {key: 1 / statistics.median(itertools.chain.from_iterable(gaps[key])) for key in gaps}
    worst = {key: statistics.median(map(max, gaps[key])) for key in gaps}
    more = {"donations": taken, "donation_mb": inner.bytes / 1e6}
    more["slowest_step_ratio"] = worst[True] / worst[False]
    return [row("donation", rate[True], rate[False], limit, "steps/s", **more)]


def _bare(equipment: Equipment, fragments: list[Any], count: int) -> float:
    """Steps a second of the learner's arrays alone."""
    arrays, clock = training_arrays(equipment, fragments), itertools.count()
    return 1 / medians({"step": lambda: arrays.step(next(clock))[1]}, count, warm_up=0)["step"]


def _take(
    pipe: Connection, address: str, leaves: list[tuple[tuple[int, ...], str]], num_fragments: int
) -> None:
    """The other process: takes one donation after another until it is stopped."""
    platform.prepare(cache=False)
    inner = InnerFormat([jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for shape, dtype in leaves])
    donating, taken = False, 0
    while donating is not None:
        if donating and not pipe.poll():
            donation = Donation(Recipient(inner, Security(), 20.0), address, (0,) * num_fragments, TIMEOUT)
            with contextlib.closing(donation):
                donation.open().take()
            taken += 1
        else:
            donating = pipe.recv()
            pipe.send(taken if donating is None else donating)
