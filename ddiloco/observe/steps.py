"""What a run leaves about each learner: a line a step, and the tracebacks of its deaths.

Tools rely on `learners/<id>/steps.jsonl`: {"time": seconds, "step": the learner's clock, "tokens": of
that step}, at most a second behind. A run that is resumed in the same folder goes on below.
"""

from __future__ import annotations

import json
import pathlib

from ddiloco.observe.alarms import Alarms
from ddiloco.observe.growing_file import GrowingFiles
from ddiloco.observe.records import LearnerDied, StepDone


class LearnerFiles:
    """The files under `<workdir>/learners/`."""

    def __init__(self, workdir: pathlib.Path, alarms: Alarms) -> None:
        self._steps = GrowingFiles(workdir / "learners", alarms, lines=True)
        self._deaths = GrowingFiles(workdir / "learners", alarms)

    def step(self, record: StepDone) -> None:
        """Adds a line to the learner's `steps.jsonl`."""
        line = {"time": float(record.time), "step": int(record.step), "tokens": int(record.tokens)}
        self._steps.append(f"{record.learner}/steps.jsonl", json.dumps(line).encode() + b"\n")

    def died(self, record: LearnerDied) -> None:
        """Adds the traceback to the learner's `traceback.txt`, after those of earlier deaths."""
        text = f"died at {record.time}\n{record.traceback.rstrip()}\n\n"
        self._deaths.append(f"{record.learner}/traceback.txt", text.encode(errors="replace"))

    def flush(self) -> None:
        """Writes what is pending; what the disk refuses is tried again at the next flush."""
        self._steps.flush()
        self._deaths.flush()

    def close(self) -> None:
        """Flushes and closes all files."""
        self._steps.close()
        self._deaths.close()
