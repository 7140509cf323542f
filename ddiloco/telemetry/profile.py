"""A trace of some of a learner's steps by `jax.profiler`, during the run."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable
from typing import Any, Protocol

import jax

from ddiloco.telemetry.records import StepDone

FOLDER = "profile"  # of a run, in its workdir


class Watch(Protocol):
    """An observer of a process's records."""

    def watching(self, record: Callable[[Any], None]) -> Callable[[Any], None]:
        """`record`, with what passes through it seen."""

    def close(self) -> None:
        """Nothing more will pass."""


class StepProfile:
    """Traces this process from the end of step `first` - 1 of its first learner to the end of step `last`.

    With several steps in flight the devices are by then at the next ones.
    """

    def __init__(
        self, folder: pathlib.Path, first: int, last: int, print_line: Callable[[str], None]
    ) -> None:
        """`print_line` takes the line that says where the trace is, and how to open it."""
        self._folder, self._first, self._last, self._print_line = folder, first, last, print_line
        self._learner: int | None = None  # whose steps count, once the trace has begun
        self._writing: threading.Thread | None = None

    def watching(self, record: Callable[[Any], None]) -> Callable[[Any], None]:
        """`record`, with the trace begun and ended by the steps that pass through it."""

        def watch(one: Any) -> None:
            record(one)
            if isinstance(one, StepDone) and self._writing is None:
                self._stepped(one)

        return watch

    def close(self) -> None:
        """Ends a trace whose last step has not come, and waits until the files are written."""
        if self._learner is not None and self._writing is None:
            self._end()
        if self._writing is not None:
            self._writing.join()

    def _stepped(self, done: StepDone) -> None:
        if self._learner is None and self._first - 1 <= done.step < self._last:
            self._learner = done.learner
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
        elif self._learner == done.learner and done.step >= self._last:
            self._end()

    def _end(self) -> None:
        # Not in the learner's thread, which writing the files would hold up for seconds.
        self._writing = threading.Thread(target=self._write, name="profile")
        self._writing.start()

    def _write(self) -> None:
        jax.profiler.stop_trace()
        found = sorted(self._folder.rglob("perfetto_trace.json.gz"))
        self._print_line(
            f"steps {self._first} to {self._last} are profiled in {self._folder}: open "
            f"{found[-1] if found else self._folder} at https://ui.perfetto.dev, or all of it by "
            f"tensorboard --logdir={self._folder} (with pip install xprof)"
        )
