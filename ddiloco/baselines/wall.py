"""The baselines: one synchronous job without a syncer, on all shards or on one."""

from __future__ import annotations

import collections
import errno
import functools
import pathlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ddiloco.config import ConfigError
from ddiloco.data.shards import reshard
from ddiloco.goodput.accounting import State
from ddiloco.outer.stacks import unstacked
from ddiloco.protocol.work import LearnerWork
from ddiloco.settings.experiment import Experiment, to_json
from ddiloco.settings.loop import LoopConfig
from ddiloco.storage import run_mark
from ddiloco.storage.durable import FOLDER as DURABLE
from ddiloco.storage.learner_state import LearnerState, LearnerStates, StateHeader, checkpoint_root
from ddiloco.storage.run_mark import RunMark
from ddiloco.storage.snapshots import FOLDER as SNAPSHOTS
from ddiloco.storage.snapshots import SYNCER, SnapshotHeader, SnapshotStore
from ddiloco.telemetry import records
from ddiloco.training.step_meter import StepMeter
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.checkpointing import Checkpointing
from ddiloco.workers.evaluator import Evaluations, unless
from ddiloco.workers.learner_arrays import STEPS_IN_FLIGHT, Equipment, TrainingArrays
from ddiloco.workers.run_result import Outcome

_NO_CODEC = ("", False, False)  # a job sends nothing


class JobArrays(TrainingArrays):
    """The arrays of a baseline's job under any driver: those of a learner that offers nothing."""

    def __init__(self, assembly: Assembly) -> None:
        e = assembly.experiment
        [(mesh, self._shards)] = assembly.jobs()
        self._num_shards = e.sync.num_learners
        program = assembly.program(mesh, self._shards)
        super().__init__(Equipment(program, None, assembly.batches(self._shards)))
        self._assembly = assembly
        self.tokens = 0  # of the steps that are complete
        self.scorer = functools.partial(assembly.scorer, mesh)
        flops = assembly.recipe.step_flops(assembly.recipe.kind(self._shards))
        self.meter = StepMeter(mesh.devices.flat, flops, assembly.peak_flops(mesh))

    def begin(self) -> None:
        """Loads the initial parameters."""
        self._state = self._equipment.program.state_from(self._assembly.initial_parameters())

    def resume(self, state: LearnerState) -> None:
        """Loads a checkpoint of the job, of any number of shards.

        Raises:
          DataError: its stream was another.
        """
        position = state.header.position
        if not isinstance(self._assembly.experiment.model, LoopConfig):  # whose shards it alone knows
            [position] = reshard([position], self._num_shards, [self._shards])
        self.restore(state.arrays, {"position": position, "steps": 0})
        self.tokens = state.header.tokens

    def parameters(self) -> dict[str, np.ndarray]:
        """The parameters after the last step handed out, on the host."""
        return unstacked({name: np.asarray(value) for name, value in self.params.items()})


class JobStates:
    """The checkpoints and snapshots of a job, which are those of learner 0; there is nothing beside them."""

    def __init__(self, experiment: Experiment, workdir: pathlib.Path, record: Callable[[Any], None]) -> None:
        """Keeps the id of the run in the workdir, if one has begun. Raises OSError, RunMarkError."""
        self._experiment, self._record = experiment, record
        folder, mark = workdir / DURABLE, run_mark.begun(workdir / DURABLE)
        self._mark = mark or RunMark(secrets.token_hex(16), secrets.token_hex(8))
        if mark is None:
            folder.mkdir(parents=True, exist_ok=True)
            self._mark.save(folder)
        root = checkpoint_root(workdir, experiment.recovery.checkpoint_folder)
        self._states = LearnerStates(root / "learners" / "0")
        self._store = SnapshotStore(workdir / SNAPSHOTS, experiment.snapshot.keep)
        every, what = experiment.recovery.checkpoint_every, f"{self._states.folder}"
        self.keeper = Checkpointing(self._keep, every, what, record, self._written)
        self._begun: dict[int, tuple[int, float]] = {}  # by number of a snapshot: its step, and when

    def newest(self) -> LearnerState | None:
        """The state to resume from; None: the run is new. Raises ValueError: the saved one cannot be used."""
        return self._states.newest(self._mark.run)

    def due(self, step: int) -> bool:
        """Whether the state after this step is to be kept, for a snapshot or by the interval."""
        every = self._experiment.snapshot.every
        if every and step % every == 0:
            try:
                number = self._store.begin()
                self._begun[number] = step, time.monotonic()
                self.keeper.ask(number)
            except OSError as error:
                self._given_up(0, step, records.reason(error))
        return self.keeper.due

    def state(self, step: int, tokens: int, arrays: Mapping[str, Any], position: Any) -> LearnerState:
        """The job's state after a step, with none under way."""
        shards = self._experiment.num_data_shards
        work = LearnerWork(step, 0, step, ())
        counted = {"trained": step, "tokens": tokens, "steps": step, "time": time.time()}
        header = StateHeader(self._mark.run, "", _NO_CODEC, work, position, shards, **counted)
        return LearnerState(header, arrays)

    def _keep(self, state: LearnerState, snapshot: int) -> None:
        (self._states.of_snapshot(snapshot) if snapshot else self._states).keep(state)

    def _written(self, number: int, result: LearnerState | str) -> None:
        """Completes a snapshot, on the thread that has written its checkpoint."""
        step, begun = self._begun.pop(number)
        records.write_out(self._record)  # what led to the snapshot must be on disk if the snapshot is
        try:
            if isinstance(result, str):
                raise OSError(errno.EIO, result)
            step = result.header.work.clock
            folder = self._store.at(number) / SYNCER
            folder.mkdir()
            self._mark.save(folder)
            header = SnapshotHeader(self._mark.run, step, time.time(), (0,), to_json(self._experiment))
            size = sum(self._store.complete(number, header).header.files.values())
        except OSError as error:
            self._store.discard(number)
            self._given_up(number, step, records.reason(error))
            return
        values = {"number": number, "step": step, "bytes": size, "seconds": time.monotonic() - begun}
        self._record(records.Noted("snapshot", values, time.time()))

    def _given_up(self, number: int, step: int, problem: str) -> None:
        values = {"number": number, "step": step, "reason": problem}
        self._record(records.Noted("snapshot_given_up", values, time.time()))
        alarm = f"{self._store.folder}: {problem}: a snapshot is given up; training continues"
        self._record(records.Alarm(alarm, time.time()))


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
        comes_back: Callable[[], bool] = lambda: False,
    ) -> None:
        """Resumes the run in the workdir, if one has begun there; None: nothing is saved.

        `comes_back`: as of `LocalRun`.

        Raises:
          ConfigError: the disk refuses, or its run cannot be resumed.
          RunMarkError: the mark of the run in the workdir cannot be read.
        """
        e = self._experiment = assembly.experiment
        self._record, self._stop, self._comes_back = record, stop, comes_back
        self._arrays = JobArrays(assembly)
        try:
            self._states = None if workdir is None else JobStates(e, workdir, record)
            state = None if self._states is None else self._states.newest()
        except (OSError, ValueError) as error:
            raise ConfigError(f"workdir: {workdir}: {records.reason(error)}") from None
        self._begin = 0 if state is None else state.header.work.clock
        score = self._arrays.scorer(functools.partial(unless, stop))  # what it ends with is scored anew
        self._evaluations = Evaluations(score, e.eval.every, record, since=self._begin)
        if state is None:
            self._arrays.begin()
            self._evaluate(0)
        else:
            self._arrays.resume(state)

    def run(self) -> Outcome:
        """Trains to the last step, or until `stop` is set."""
        e, states = self._experiment, self._states
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
            keep = states is not None and states.due(step)
            while len(in_flight) > (0 if due or keep or slowest else STEPS_IN_FLIGHT - 1):
                self._finish_step(*in_flight.popleft())
            if keep:
                states.keeper.take(functools.partial(self._state, step))
            if due:
                self._evaluate(step)
        while in_flight:
            self._finish_step(*in_flight.popleft())
        if states is not None:
            states.keeper.last(functools.partial(self._state, step))
        self._enter(State.FINISHED)
        finished, loss = step == e.train.steps, None
        if finished or not self._comes_back():
            last = Evaluations(self._arrays.scorer(), 0, self._record)
            loss = last.evaluate(step, self._arrays.tokens, self._arrays.params)
        return Outcome(self._arrays.parameters(), step, loss, finished, failure=None)

    def _start_step(self, step: int) -> tuple[int, int, dict[str, jax.Array], float]:
        tokens, metrics = self._arrays.step(step)
        return step + 1, tokens, metrics, self._arrays.data_wait

    def _finish_step(self, step: int, tokens: int, metrics: dict[str, jax.Array], data_wait: float) -> None:
        jax.block_until_ready(metrics)
        measured = self._arrays.meter.finished(data_wait)
        done = records.StepDone(0, step, time.time(), tokens, {**metrics, **measured})
        self._arrays.tokens += done.tokens
        self._record(done)

    def _state(self, step: int) -> LearnerState:
        arrays, values = self._arrays.state()
        return self._states.state(step, self._arrays.tokens, arrays, values["position"])

    def _evaluate(self, step: int) -> None:
        self._arrays.meter.interrupted()
        self._evaluations.evaluate(step, self._arrays.tokens, self._arrays.params)

    def _enter(self, state: State) -> None:
        self._record(records.StateChanged(0, state, time.time()))
