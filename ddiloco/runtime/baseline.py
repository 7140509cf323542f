"""The baselines: one synchronous job without a syncer, on all shards or on one."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ddiloco.goodput.accounting import State
from ddiloco.observe import records
from ddiloco.runtime.assembly import Assembly
from ddiloco.runtime.outcome import Outcome
from ddiloco.training.evaluation import Score
from ddiloco.training.program import TrainProgram
from ddiloco.training.step import TrainState


class JobArrays:
    """The arrays of the one job: train state, batches, held-out score; of a baseline under any driver."""

    def __init__(self, assembly: Assembly) -> None:
        e = assembly.experiment
        [(mesh, shards)] = assembly.jobs()
        rows = sum(e.batch_size(shard) for shard in shards)
        self.tokens = 0  # trained on so far
        self._batches = assembly.batches(shards, rows)
        self._program: TrainProgram = assembly.program(mesh, rows)
        self._score: Callable[[Mapping[str, Any]], Score] = assembly.scorer(mesh)
        self._state: TrainState = self._program.state_from(assembly.initial_parameters())

    def step(self, clock: int) -> tuple[int, dict[str, jax.Array]]:
        """Hands the next inner step to the devices; its tokens, and metrics that may still be under way."""
        batch = next(self._batches)
        tokens = int(batch["weights"].sum())
        self.tokens += tokens
        self._state, metrics = self._program.step(self._state, batch, clock)
        return tokens, metrics

    def score(self) -> Score:
        """The held-out score of the parameters as they are now."""
        return self._score(self._state.params)

    def parameters(self) -> dict[str, np.ndarray]:
        """The parameters, on the host."""
        return {name: np.asarray(value) for name, value in self._state.params.items()}


class BaselineRun:
    """Trains one copy of the model in the calling thread; it appears in the metrics as learner 0."""

    def __init__(self, assembly: Assembly, record: Callable[[Any], None], stop: threading.Event) -> None:
        self._experiment = assembly.experiment
        self._record = record
        self._stop = stop
        self._arrays = JobArrays(assembly)
        self._evaluate(0)

    def run(self) -> Outcome:
        """Trains to the last step, or until `stop` is set."""
        e = self._experiment
        in_flight: collections.deque = collections.deque()
        self._enter(State.STEPPING)
        step = 0
        while step < e.train.steps and not self._stop.is_set():
            in_flight.append(self._start_step(step))
            step += 1
            due = bool(e.eval.every) and step % e.eval.every == 0 and step < e.train.steps
            while len(in_flight) > (0 if due else e.train.steps_in_flight - 1):
                self._finish_step(*in_flight.popleft())
            if due:
                self._evaluate(step)
        while in_flight:
            self._finish_step(*in_flight.popleft())
        self._enter(State.FINISHED)
        loss = self._evaluate(step)
        params = self._arrays.parameters()
        return Outcome(params, step, loss, finished=step == e.train.steps, failure=None)

    def _start_step(self, step: int) -> tuple[int, int, dict[str, jax.Array]]:
        tokens, metrics = self._arrays.step(step)
        return step + 1, tokens, metrics

    def _finish_step(self, step: int, tokens: int, metrics: dict[str, jax.Array]) -> None:
        jax.block_until_ready(metrics)
        self._record(records.StepDone(0, step, time.time(), tokens, metrics))

    def _evaluate(self, step: int) -> float:
        score = self._arrays.score()
        now = time.time()
        self._record(records.Evaluated(step, self._arrays.tokens, now, score.loss, score.statistics))
        return score.loss

    def _enter(self, state: State) -> None:
        self._record(records.StateChanged(0, state, time.time()))


def run_baseline(assembly: Assembly, record: Callable[[Any], None], stop: threading.Event) -> Outcome:
    """Runs `data_parallel` (the batches of all learners in one) or `lone_learner` (those of learner 0)."""
    return BaselineRun(assembly, record, stop).run()
