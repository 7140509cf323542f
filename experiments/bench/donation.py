"""Whether a learner steps on while it gives its inner optimizer state away: its steps a second."""

from __future__ import annotations

import itertools
import multiprocessing
import queue
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import jax
import numpy as np

from ddiloco.outer.fragments import take
from ddiloco.protocol import events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.remote.learner.donor import Donor, InnerFormat, fetch
from ddiloco.remote.wire.security import Security
from ddiloco.roles.delivery import Leave, WelcomeDelivery
from ddiloco.roles.learner_arrays import Equipment
from ddiloco.roles.learner_worker import LearnerWorker
from ddiloco.roles.snapshots.recording import LearnerRecording
from ddiloco.run.recipes import assembly_of
from ddiloco.training import platform
from experiments.bench.learner import experiment
from experiments.bench.row import row

PATIENCE = 120.0


def run(quick: bool = False) -> list[dict]:
    """Measures one learner whose peer, another process, takes donation after donation (or none), in turn.

    Returns:
      One row, in steps a second: `measured` while donations go out back to back; `reference` the same learner
      without them; `limit` the bare step loop on the same program, before. Also `donations` (in all),
      `donation_mb` and `slowest_step_ratio`: the longest gap between two steps with donations over without.
    """
    assembly = assembly_of(experiment(1, quick))
    equipment = assembly.own_equipment(0)
    initial = assembly.initial_parameters()
    fragments = [take(assembly.layout, p, initial) for p in range(assembly.layout.num_fragments)]
    limit = _bare(equipment, fragments, 5 if quick else 40)
    inner = InnerFormat(equipment.program.inner_leaves)
    learner = SteppingLearner(equipment, fragments)
    donor = Donor(Security(), 20.0)
    port = donor.start("127.0.0.1")
    donor.attach(learner.worker.inbox, inner)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    leaves = [(leaf.shape, np.dtype(leaf.dtype).str) for leaf in equipment.program.inner_leaves]
    peer = multiprocessing.get_context("spawn").Process(
        target=_take, args=(theirs, f"127.0.0.1:{port}", leaves, len(fragments)), daemon=True
    )
    peer.start()
    gaps: dict[bool, list[list[float]]] = {False: [], True: []}
    try:
        learner.gaps(3)
        for donating in itertools.islice(itertools.cycle((False, True, True, False)), 4 if quick else 16):
            ours.send(donating)
            assert ours.poll(PATIENCE) and ours.recv() == donating
            gaps[donating].append(learner.gaps(5 if quick else 30))
        ours.send(None)
        taken = ours.recv() if ours.poll(PATIENCE) else 0
    finally:
        peer.join(PATIENCE)
        learner.end()
        donor.stop()
    rate = {key: 1 / statistics.median(itertools.chain.from_iterable(gaps[key])) for key in gaps}
    worst = {key: statistics.median(map(max, gaps[key])) for key in gaps}
    return [
        row(
            "donation",
            rate[True],
            rate[False],
            limit,
            "steps/s",
            donations=taken,
            donation_mb=inner.bytes / 1e6,
            slowest_step_ratio=worst[True] / worst[False],
        )
    ]


class SteppingLearner:
    """A LearnerWorker that steps without a syncer."""

    def __init__(
        self, equipment: Equipment, fragments: list[Any], recording: LearnerRecording | None = None
    ) -> None:
        self._times: queue.SimpleQueue[float] = queue.SimpleQueue()
        policy = SyncPolicy(num_learners=1, num_fragments=len(fragments), interval=24)
        core = LearnerCore(0, 1, policy, None)
        self.worker = LearnerWorker(core, equipment, lambda event: None, self._record, recording=recording)
        self.worker.start()
        zeros = (0,) * len(fragments)
        self.worker.inbox.put(WelcomeDelivery(events.Welcomed(1, 0, zeros, zeros), fragments))

    def _record(self, record: Any) -> None:
        if type(record).__name__ == "StepDone":
            self._times.put(time.perf_counter())

    def gaps(self, count: int) -> list[float]:
        """Seconds between the next `count` + 1 steps."""
        while not self._times.empty():
            self._times.get()
        times = [self._times.get(timeout=PATIENCE) for _ in range(count + 1)]
        return [b - a for a, b in itertools.pairwise(times)]

    def gaps_until(self, over: Callable[[], bool]) -> list[float]:
        """Seconds between the steps that follow, the first from now on, until `over` holds after one."""
        while not self._times.empty():
            self._times.get()
        times = [time.perf_counter()]
        while not over():
            times.append(self._times.get(timeout=PATIENCE))
        return [b - a for a, b in itertools.pairwise(times)]

    def end(self) -> None:
        """Ends its thread."""
        self.worker.inbox.put(Leave())
        self.worker.join(PATIENCE)


def _bare(equipment: Equipment, fragments: list[Any], count: int) -> float:
    """Steps a second of the program alone."""
    program = equipment.program
    state = program.state_from(equipment.transfer.whole(fragments))
    batches = [next(equipment.batches) for _ in range(4)]
    seconds = []
    for clock in range(count):
        start = time.perf_counter()
        state, metrics = program.step(state, batches[clock % 4], clock)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - start)
    return 1 / statistics.median(seconds)


def _take(
    pipe: Connection, address: str, leaves: list[tuple[tuple[int, ...], str]], num_fragments: int
) -> None:
    """The other process: takes one donation after the other while it is told to."""
    platform.prepare(cache=False)
    inner = InnerFormat([jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for shape, dtype in leaves])
    donating, taken = False, 0
    while True:
        if not donating or pipe.poll():
            donating = pipe.recv()
            if donating is None:
                pipe.send(taken)
                return
            pipe.send(donating)
            continue
        fetch(address, (0,) * num_fragments, inner, Security(), 20.0, PATIENCE)
        taken += 1
