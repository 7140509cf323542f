"""Scores the global model on held-out rows while training goes on, in a thread of its own."""

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
from ddiloco.training.evaluation import Score


class Evaluator:
    """Takes the newest parameters offered; while it is busy, further offers are passed over."""

    def __init__(
        self,
        score: Scorer,
        every: int,
        tokens_so_far: Callable[[], int],
        record: Callable[[Any], None],
    ) -> None:
        self._score = score
        self._every = every
        self._next = every
        self._tokens_so_far = tokens_so_far
        self._record = record
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
        if not self._every or step < self._next:
            return
        self._next = (step // self._every + 1) * self._every
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

    def evaluate(self, step: int, params: Mapping[str, Any]) -> float | None:
        """Evaluates in the caller's thread and records the result; gives the loss."""
        tokens = self._tokens_so_far()
        return note_score(self._score(params), step, tokens, time.time(), self._record)

    def _run(self) -> None:
        while (offer := self._offers.get()) is not None:
            step, tokens, params = offer
            try:
                score = self._score(params())
            except Exception as error:  # training goes on, and tells of it at its end
                self.failure = f"at step {step}: {type(error).__name__}: {error}"
                continue
            note_score(score, step, tokens, time.time(), self._record)


def note_score(
    score: Score | None, step: int, tokens: int, now: float, record: Callable[[Any], None]
) -> float | None:
    """Records an evaluation and gives its loss; None where nothing scores, as a loop without `evaluate`."""
    if score is None:
        return None
    record(records.Evaluated(step, tokens, now, score.loss, score.statistics))
    return score.loss
