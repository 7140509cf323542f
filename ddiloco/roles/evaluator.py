"""Scores of the global model on held-out rows: when they are due, and in a thread of their own."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ddiloco.observe import records
from ddiloco.roles.assembly import Scorer

Params = Mapping[str, Any]


class Evaluations:
    """Scores parameters and records the results."""

    def __init__(
        self,
        score: Scorer,
        every: int,
        record: Callable[[Any], None],
        clock: Callable[[], float] = time.time,
        since: int = 0,
    ) -> None:
        """`every`: global steps between two; 0: none is ever due. `clock`: seconds that records carry.

        `since`: the global step from which on multiples of `every` count.
        """
        self._score, self._every, self._record, self._clock = score, every, record, clock
        self._next = self._after(since)

    def due(self, step: int) -> bool:
        """Whether one is due, now that the global step is `step`: once for each multiple of `every`."""
        if not self._every or step < self._next:
            return False
        self._next = self._after(step)
        return True

    def evaluate(self, step: int, tokens: int, params: Params) -> float | None:
        """Scores parameters and records the result; gives the loss. `tokens`: that they were trained on.

        None, and no record, where nothing scores: for a loop of one's own without `evaluate`.
        """
        score = self._score(params)
        if score is None:
            return None
        self._record(records.Evaluated(step, tokens, self._clock(), score.loss, score.statistics))
        return score.loss

    def _after(self, step: int) -> int:
        return (step // self._every + 1) * self._every if self._every else 0


class Evaluator:
    """Takes the newest parameters offered; while it is busy, further offers are passed over."""

    def __init__(
        self,
        score: Scorer,
        every: int,
        tokens_so_far: Callable[[], int],
        record: Callable[[Any], None],
    ) -> None:
        self._evaluations = Evaluations(score, every, record)
        self._tokens_so_far = tokens_so_far
        self._offers: queue.Queue[tuple[int, int, Callable[[], Mapping[str, np.ndarray]]] | None] = (
            queue.Queue(1)
        )
        self._thread = threading.Thread(target=self._run, name="evaluator", daemon=True)
        self.failure: str | None = None  # of the latest evaluation that failed

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def offer(self, step: int, params: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """Evaluates at the first offer from each multiple of `every` on; for one thread, never waits."""
        if self._evaluations.due(step):
            with contextlib.suppress(queue.Full):
                self._offers.put_nowait((step, self._tokens_so_far(), params))

    def stop(self, timeout: float) -> bool:
        """Ends the thread after the evaluation under way; whether it ended in time."""
        try:
            self._offers.put(None, timeout=timeout)
        except queue.Full:
            return False
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def evaluate(self, step: int, params: Params) -> float | None:
        """Evaluates in the caller's thread and records the result; gives the loss."""
        return self._evaluations.evaluate(step, self._tokens_so_far(), params)

    def _run(self) -> None:
        while (offer := self._offers.get()) is not None:
            step, tokens, params = offer
            try:
                self._evaluations.evaluate(step, tokens, params())
            except Exception as error:  # training goes on, and tells of it at its end
                self.failure = f"at step {step}: {type(error).__name__}: {error}"
