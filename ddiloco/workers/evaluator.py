"""Scores the global model on held-out rows: decides when it is due, and does it in its own thread."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from ddiloco.telemetry import records
from ddiloco.workers.assembly import Scorer

Params = Mapping[str, Any]
Result = TypeVar("Result")
_Offer = tuple[int, int, Callable[[], Mapping[str, np.ndarray]]]  # step, tokens, parameters


class Abandoned(Exception):
    """An evaluation that the end of the run does not wait for."""


def unless(stop: threading.Event, call: Callable[[], Result]) -> Result:
    """Makes a scorer's call of the devices; raises Abandoned once `stop` is set."""
    if stop.is_set():
        raise Abandoned
    return call()


class Evaluations:
    """Scores parameters and records the results."""

    def __init__(
        self,
        score: Scorer,
        every: int | None,
        record: Callable[[Any], None],
        clock: Callable[[], float] = time.time,
        since: int = 0,
    ) -> None:
        """`every`: global steps between two evaluations; 0, None: none is due. `clock`: seconds, for records.

        `since`: the global step after which the next multiple of `every` is due.
        """
        self._score, self._every, self._record, self._clock = score, every, record, clock
        self._next = self._after(since)

    def due(self, step: int) -> bool:
        """Whether an evaluation is due at global step `step`: once for each multiple of `every`."""
        if not self._every or step < self._next:
            return False
        self._next = self._after(step)
        return True

    def evaluate(self, step: int, tokens: int, params: Params) -> float | None:
        """Scores parameters and records the result; gives the loss. `tokens`: trained on so far.

        None, without a record, where there is no score, or it is abandoned.
        """
        try:
            score = self._score(params)
        except Abandoned:
            return None
        if score is None:
            return None
        self._record(records.Evaluated(step, tokens, self._clock(), score.loss, score.statistics))
        return score.loss

    def _after(self, step: int) -> int:
        return (step // self._every + 1) * self._every if self._every else 0


class Evaluator:
    """Evaluates the parameters offered to it in its own thread; while it is busy, it ignores offers."""

    def __init__(
        self,
        score: Scorer,
        every: int | None,
        tokens_so_far: Callable[[], int],
        record: Callable[[Any], None],
        since: int = 0,
    ) -> None:
        """`since`: as of `Evaluations`."""
        self._evaluations = Evaluations(score, every, record, since=since)
        self._tokens_so_far = tokens_so_far
        self._offers: queue.Queue[_Offer | None] = queue.Queue(1)
        self._thread = threading.Thread(target=self._run, name="evaluator", daemon=True)
        self.failure: str | None = None  # of the latest evaluation that failed
        self.broken = False  # whether the first one failed

    def start(self, initial: Params | None = None) -> None:
        """Starts the thread; `initial`: the parameters at step 0, to be evaluated first."""
        if initial is not None:
            self._offers.put((0, self._tokens_so_far(), lambda: initial))
        self._thread.start()

    def offer(self, step: int, params: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """Evaluates the first offer at or after each multiple of `every`; never waits. For one thread."""
        if self._evaluations.due(step):
            with contextlib.suppress(queue.Full):
                self._offers.put_nowait((step, self._tokens_so_far(), params))

    def stop(self, timeout: float) -> bool:
        """Ends the thread after the current evaluation; whether it ended within `timeout` seconds."""
        try:
            self._offers.put(None, timeout=timeout)
        except queue.Full:
            return False
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        going_on = self._evaluated(self._offers.get())
        self.broken = self.failure is not None
        while going_on:  # and until the next offer nothing here keeps the parameters of the last one
            going_on = self._evaluated(self._offers.get())

    def _evaluated(self, offer: _Offer | None) -> bool:
        """Whether there was an offer, which it has evaluated."""
        if offer is None:
            return False
        step, tokens, params = offer
        try:
            self._evaluations.evaluate(step, tokens, params())
        except Exception as error:  # training continues; the run reports it at the end
            self.failure = f"at step {step}: {type(error).__name__}: {error}"
        return True
