"""What several benchmarks measure on: a dense model of 5.4M parameters, and a learner that steps alone."""

from __future__ import annotations

import itertools
import pathlib
import queue
import threading
import time
import types
from collections.abc import Callable
from typing import Any

from ddiloco.local.run import LocalRun
from ddiloco.outer.fragments import take
from ddiloco.protocol import events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.run import recipes
from ddiloco.settings.experiment import parse
from ddiloco.telemetry.records import StepDone
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.exchange import EventDelivery, Leave
from ddiloco.workers.learner_arrays import Equipment, TrainingArrays
from ddiloco.workers.learner_worker import Checkpoints, LearnerWorker
from experiments.bench.another_process import TIMEOUT
from experiments.cli import program


def assembly_of(steps: int, quick: bool) -> Assembly:
    """Four learners for this number of steps, P=24, H=24, tau=2, K=1; `quick`: a fraction of the model."""
    config = program.load_config("configs/dense.py:tiny")
    config.inner.optimizer, config.inner.learning_rate = "adamw", 3e-3  # two moments of every parameter
    if quick:
        config.model.update(num_layers=1, model_dim=32, num_heads=2, num_kv_heads=1, head_dim=16, mlp_dim=64)
        config.data.sequence_length = 32
        config.sync.update(num_fragments=4, interval=4)
    else:
        config.model.update(num_layers=6, model_dim=256, num_heads=8, num_kv_heads=4, mlp_dim=896)
        config.sync.update(num_fragments=24, interval=24)
    config.train.update(steps=steps, batch_size=4)
    config.eval.update(every=0, num_batches=1)
    return recipes.assembly_of(parse(config))


def initial_fragments(assembly: Assembly) -> list[Any]:
    """The parameters that training begins with, fragment by fragment."""
    initial = assembly.initial_parameters()
    return [take(assembly.layout, p, initial) for p in range(assembly.layout.num_fragments)]


def training_arrays(equipment: Equipment, fragments: list[Any]) -> TrainingArrays:
    """A learner's arrays with these parameters."""
    arrays = TrainingArrays(equipment)
    arrays.adopt(fragments)
    return arrays


def run_to_the_end(assembly: Assembly, workdir: pathlib.Path | None = None) -> list[Any]:
    """Trains in threads of this process; the records of it. Raises RuntimeError if the run failed."""
    records: list[Any] = []
    outcome = LocalRun(assembly, records.append, threading.Event(), workdir).run()
    if outcome.failure is not None:
        raise RuntimeError(outcome.failure)
    return records


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
