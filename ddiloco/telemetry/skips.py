"""Steps that are skipped since loss or gradient is not finite: when they are an alarm, and when the end."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

from ddiloco.telemetry.records import LOST, READY, Alarm, LearnerDied, Noted, RunInfo, StepDone

MANY = 0.1
"""Share of an interval's steps of a learner; more that are skipped are an alarm."""

NEARLY_ALL = 0.9
"""Share of an interval's steps; where every learner skips as many, the run learns nothing, and ends."""

MIN_STEPS = 10
"""Of the steps by which a run is ended: where intervals are shorter, one bad batch must not end it."""

REMEDY = "try a lower inner.learning_rate, more inner.warmup_steps, a smaller inner.clip_norm, or other data"


class SkipWatch:
    """Looks on the records of a run as they pass, whichever threads they come from.

    Attributes:
      failure: why the run was ended, in one line; None: it was not.
    """

    def __init__(self, info: RunInfo, interval: int, end: Callable[[str], None]) -> None:
        """`interval`: a learner's steps between two merges of a fragment. `end` is called once."""
        self.failure: str | None = None
        self._end = end
        self._interval = max(1, min(interval, info.total_steps))
        self._judged = max(1, min(max(interval, MIN_STEPS), info.total_steps))
        # No single peer may end a run of several learners; a baseline is one job, whatever it runs on.
        self._fewest = min(2, info.num_learners) if info.num_fragments else 1
        self._lock = threading.Lock()
        self._last: dict[int, collections.deque[tuple[int, bool]]] = {}  # by learner that is there
        self._alarmed: set[int] = set()

    def watching(self, record: Callable[[Any], None]) -> Callable[[Any], None]:
        """`record`, with the steps that pass through it looked at."""

        def watch(one: Any) -> None:
            record(one)
            with self._lock:
                match one:
                    case StepDone():
                        self._step_done(one, record)
                    case LearnerDied(learner=learner):
                        self._last.pop(learner, None)
                    case Noted(name=name, values=values) if name in LOST:
                        self._last.pop(values.get("learner", -1), None)
                    case Noted(name=name, values=values) if name in READY:
                        self._of(values["learner"])  # it is there, and may learn

        return watch

    def _of(self, learner: int) -> collections.deque[tuple[int, bool]]:
        return self._last.setdefault(learner, collections.deque(maxlen=self._judged))

    def _step_done(self, step: StepDone, record: Callable[[Any], None]) -> None:
        last = self._of(step.learner)
        last.append((step.step, step.skipped))
        if not step.skipped:
            return
        recent = [*last][-self._interval :]
        count = sum(skipped for _, skipped in recent)
        if count <= MANY * self._interval:
            self._alarmed.discard(step.learner)
        elif step.learner not in self._alarmed:
            self._alarmed.add(step.learner)
            first = next(number for number, skipped in recent if skipped)
            sentence = (
                f"learner {step.learner}: skips steps, from step {first} on {count} of {len(recent)}, "
                "as loss or gradient is not finite"
            )
            record(Alarm(sentence, step.time))
        if self.failure is None and self._learns_nothing():
            first = min(next(number for number, skipped in each if skipped) for each in self._last.values())
            whose = "every learner skips" if len(self._last) > 1 else "the run skips"
            self.failure = (
                f"from step {first} on {whose} nearly all steps, as loss or gradient is not finite: {REMEDY}"
            )
            record(Alarm(self.failure, step.time))
            self._end(self.failure)

    def _learns_nothing(self) -> bool:
        """Whether all present learners have skipped nearly all of their last steps."""
        each = self._last.values()
        skipped = (
            len(last) == self._judged and sum(s for _, s in last) >= NEARLY_ALL * len(last) for last in each
        )
        return len(each) >= self._fewest and all(skipped)
