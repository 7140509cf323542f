"""The baselines: one synchronous job without a syncer, on all shards or on one."""

from __future__ import annotations

import collections
import concurrent.futures
import math
import pathlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ddiloco.data.shards import reshard
from ddiloco.goodput.accounting import State
from ddiloco.outer.stacks import unstacked
from ddiloco.settings.experiment import Experiment, to_json
from ddiloco.storage.snapshots.parts import write_part
from ddiloco.storage.snapshots.store import FOLDER, Snapshot, SnapshotError, SnapshotPart, SnapshotStore
from ddiloco.telemetry import records
from ddiloco.training.step_meter import StepMeter
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.evaluator import Evaluations
from ddiloco.workers.learner_arrays import Equipment, TrainingArrays
from ddiloco.workers.run_result import Outcome

JOB_PART = "job"


class JobArrays(TrainingArrays):
    """The arrays of a baseline's job under any driver: those of a learner that offers nothing."""

    def __init__(self, assembly: Assembly) -> None:
        e = assembly.experiment
        [(mesh, self._shards)] = assembly.jobs()
        self._num_shards = e.sync.num_learners
        program = assembly.program(mesh, self._shards)
        super().__init__(Equipment(program, None, assembly.batches(self._shards), e.train.steps_in_flight))
        self._state = program.state_from(assembly.initial_parameters())
        self.tokens = 0  # of the steps that are complete
        self.score = assembly.scorer(mesh)
        flops = assembly.recipe.step_flops(assembly.recipe.kind(self._shards))
        self.meter = StepMeter(mesh.devices.flat, flops, assembly.peak_flops(mesh))

    def part(self) -> SnapshotPart:
        """A copy of all that the next steps depend on, after the last step handed out, for `resume`.

        What is missing are its `tokens`, which are known once that step is complete.
        """
        arrays, values = self.state()
        return SnapshotPart(arrays, {"position": values["position"]})

    def resume(self, part: SnapshotPart) -> None:
        """Loads what `part` gave, with its tokens, of any number of shards.

        Raises:
          DataError: its stream was another.
        """
        [position] = reshard([part.state["position"]], self._num_shards, [self._shards])
        self.restore(part.arrays, {"position": position, "steps": 0})
        self.tokens = part.state["tokens"]

    def parameters(self) -> dict[str, np.ndarray]:
        """The parameters after the last step handed out, on the host."""
        return unstacked({name: np.asarray(value) for name, value in self.params.items()})


class JobSnapshots:
    """Writes the job's state between two steps as snapshots of one part, one at a time, in its own thread."""

    def __init__(
        self, workdir: pathlib.Path | None, experiment: Experiment, record: Callable[[Any], None]
    ) -> None:
        """Without a workdir, none are taken."""
        self._every = experiment.snapshot.every if workdir is not None else 0
        self._folder = (workdir or pathlib.Path()) / FOLDER
        self._store = SnapshotStore(self._folder, experiment.snapshot.keep)
        self._experiment = to_json(experiment)
        self._record = record
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "snapshot")
        self._writing: concurrent.futures.Future[None] | None = None

    def due(self, step: int) -> bool:
        """Whether one is due after this step."""
        return bool(self._every) and step % self._every == 0

    def take(self, part: SnapshotPart, header: Mapping[str, Any]) -> None:
        """Begins to write a snapshot, unless the one before is under way; `header`: its `step` and `time`."""
        number = self._store.next_number()
        if self._writing is not None and not self._writing.done():
            self._given_up(number, header, "the previous one is still being written")
            return
        self._writing = self._pool.submit(self._write, number, part, header)

    def close(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for the one that is being written."""
        self._pool.shutdown(wait=False)
        if self._writing is not None:
            concurrent.futures.wait([self._writing], timeout)

    def _write(self, number: int, part: SnapshotPart, header: Mapping[str, Any]) -> None:
        begun = time.monotonic()
        try:
            files = write_part(self._folder / f"{number:06d}", JOB_PART, part)
            records.write_out(self._record)  # what led to the snapshot must be on disk if the snapshot is
            self._store.complete(number, {**header, "experiment": self._experiment}, {JOB_PART: files})
        except SnapshotError as error:
            self._store.discard(number)
            self._given_up(number, header, str(error))
            problem = f"{error}: a snapshot is given up; training goes on"
            self._record(records.Alarm(problem, header["time"]))
            return
        values = {
            "number": number,
            "step": header["step"],
            "bytes": sum(size for size, _ in files.files.values()),
            "seconds": time.monotonic() - begun,
        }
        self._record(records.Noted("snapshot", values, header["time"]))

    def _given_up(self, number: int, header: Mapping[str, Any], reason: str) -> None:
        values = {"number": number, "step": header["step"], "reason": reason}
        self._record(records.Noted("snapshot_given_up", values, header["time"]))


class BaselineRun:
    """Trains one copy of the model in the calling thread; in the metrics it is learner 0.

    `data_parallel` draws the batches of all learners as one, `lone_learner` those of learner 0.
    """

    def __init__(
        self,
        assembly: Assembly,
        record: Callable[[Any], None],
        stop: threading.Event,
        workdir: pathlib.Path | None = None,
        snapshot: Snapshot | None = None,
    ) -> None:
        e = self._experiment = assembly.experiment
        self._record, self._stop = record, stop
        self._arrays = JobArrays(assembly)
        self._snapshots = JobSnapshots(workdir, e, record)
        self._begin = 0 if snapshot is None else snapshot.header["step"]
        self._evaluations = Evaluations(self._arrays.score, e.eval.every, record, since=self._begin)
        if snapshot is None:
            self._evaluate(0)
        else:
            self._arrays.resume(snapshot.part(JOB_PART))

    def run(self) -> Outcome:
        """Trains to the last step, or until `stop` is set."""
        e = self._experiment
        in_flight: collections.deque = collections.deque()
        together = 1 if e.algorithm == "lone_learner" else e.sync.num_learners
        slowest = max(e.min_step_seconds(m) for m in range(together))  # for whom the others would wait
        self._enter(State.STEPPING)
        step = self._begin
        while step < e.train.steps and not self._stop.is_set():
            begun = time.monotonic()
            in_flight.append(self._start_step(step))
            self._stop.wait(max(0.0, begun + slowest - time.monotonic()))
            step += 1
            due = step < e.train.steps and self._evaluations.due(step)  # the last one comes at the end
            while len(in_flight) > (0 if due or slowest else e.train.steps_in_flight - 1):
                self._finish_step(*in_flight.popleft())
            if due:
                self._evaluate(step)
        while in_flight:
            self._finish_step(*in_flight.popleft())
        self._enter(State.FINISHED)
        loss = self._evaluate(step)
        self._snapshots.close(e.snapshot.timeout)
        return Outcome(self._arrays.parameters(), step, loss, step == e.train.steps, failure=None)

    def _start_step(self, step: int) -> tuple[int, int, dict[str, jax.Array], float, SnapshotPart | None]:
        tokens, metrics = self._arrays.step(step)
        part = self._arrays.part() if self._snapshots.due(step + 1) else None
        return step + 1, tokens, metrics, self._arrays.data_wait, part

    def _finish_step(
        self,
        step: int,
        tokens: int,
        metrics: dict[str, jax.Array],
        data_wait: float,
        part: SnapshotPart | None,
    ) -> None:
        jax.block_until_ready(metrics)
        now = time.time()
        measured = self._arrays.meter.finished(data_wait)
        done = records.StepDone(0, step, now, tokens, {**metrics, **measured})
        self._arrays.tokens += done.tokens
        self._record(done)
        if part is not None:  # its time is just after this step's, so that a resumed run keeps this record
            whole = SnapshotPart(part.arrays, {**part.state, "tokens": self._arrays.tokens})
            self._snapshots.take(whole, {"step": step, "time": math.nextafter(now, math.inf)})

    def _evaluate(self, step: int) -> float:
        self._arrays.meter.interrupted()
        return self._evaluations.evaluate(step, self._arrays.tokens, self._arrays.params)

    def _enter(self, state: State) -> None:
        self._record(records.StateChanged(0, state, time.time()))
