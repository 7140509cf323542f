"""Which scalars of a run are curves, and under which names: handed to each of its writers."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from ddiloco.observe.records import Evaluated, Noted, StepDone
from ddiloco.observe.scalars import as_float, numbers
from ddiloco.observe.writers import RUN, Writer

_COUNTED = ("tokens", "skipped")  # metrics of a step that the summary adds up
_ROUND = ("quorum", "quorum_seconds", "grace_seconds", "sync_seconds", "merge_seconds", "disk_seconds")
_NOT_PLOTTED = ("step", "fragment", "version", "live", "tokens", "inbox", "merging")


class Metrics:
    """Scalars against steps; all learners' have the same tags, so that their curves are in one chart."""

    def __init__(self, writers: Sequence[Writer], log_every: int) -> None:
        """Learners' scalars are written every `log_every` of their steps."""
        self._writers = writers
        self._log_every = log_every
        self._counts: collections.Counter[int] = collections.Counter()
        self._since: dict[int, float] = {}  # by learner: the time of its last point
        self._tokens: collections.Counter[int] = collections.Counter()  # by learner, since that time

    def step(self, record: StepDone) -> None:
        """Loss, gradient norm, learning rate, the model's statistics and tokens a second of a learner."""
        learner = record.learner
        self._counts[learner] += 1
        self._tokens[learner] += record.tokens
        if self._counts[learner] % self._log_every and learner in self._since:
            return
        metrics = numbers(record.metrics)
        values = {f"train/{name}": value for name, value in metrics.items() if name not in _COUNTED}
        seconds = record.time - self._since.get(learner, record.time)
        if seconds > 0:
            values["train/tokens_per_second"] = self._tokens[learner] / seconds
        self._since[learner], self._tokens[learner] = record.time, 0
        self._write(f"learner_{learner}", record.step, record.time, values)

    def round(self, record: Noted) -> None:
        """Quorum, times and outer metrics of a merge, against the global step."""
        values = numbers(record.values)
        step = int(values.get("step", 0))
        tags = {
            f"{'round' if name in _ROUND else 'outer'}/{name}": value
            for name, value in values.items()
            if name not in _NOT_PLOTTED
        }
        self._write(RUN, step, record.time, tags)

    def evaluated(self, record: Evaluated) -> None:
        """The global model's score on held-out data."""
        values = {"loss": record.loss, **record.statistics}
        known = {f"eval/{name}": as_float(value) for name, value in values.items()}
        self._write(RUN, record.step, record.time, known)

    def run(self, step: int, time: float, values: Mapping[str, float | None]) -> None:
        """Figures of the whole run, such as goodput."""
        known = {f"run/{name}": value for name, value in values.items() if value is not None}
        self._write(RUN, step, time, known)

    def close(self) -> None:
        """Lets the writers end; each may raise what its service does."""
        for writer in self._writers:
            writer.close()

    def _write(self, owner: str, step: int, time: float, values: Mapping[str, float]) -> None:
        if values:
            for writer in self._writers:
                writer.write(owner, step, time, values)
