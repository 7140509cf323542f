"""What a run leaves about its learners and rounds: a line a step, a line a merge, tracebacks of deaths.

Tools rely on `learners/<id>/steps.jsonl`: {"time": seconds, "step": the learner's clock, "tokens": of
that step}, at most a second behind. `rounds.jsonl` has a line a merge: {"time", "step", "fragment",
"version", "learners" (in the merge), "tokens", ...}; `states.jsonl` one for each change of a learner's state;
`recoveries.jsonl` one for each process of a learner that joined, and where its inner optimizer state came
from. A run that is resumed in the same folder goes on below.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from ddiloco.observe.alarms import Alarms
from ddiloco.observe.growing_file import GrowingFiles
from ddiloco.observe.records import LearnerDied, Noted, StateChanged, StepDone
from ddiloco.observe.scalars import as_json


class LearnerFiles:
    """The files under `<workdir>/learners/`, and `<workdir>/rounds.jsonl`."""

    def __init__(self, workdir: pathlib.Path, alarms: Alarms) -> None:
        self._steps = GrowingFiles(workdir / "learners", alarms, lines=True)
        self._deaths = GrowingFiles(workdir / "learners", alarms)
        self._of_the_run = GrowingFiles(workdir, alarms, lines=True)

    def step(self, record: StepDone) -> None:
        """Adds a line to the learner's `steps.jsonl`."""
        line = {"time": float(record.time), "step": int(record.step), "tokens": int(record.tokens)}
        self._steps.append(f"{record.learner}/steps.jsonl", json.dumps(line).encode() + b"\n")

    def round(self, record: Noted) -> None:
        """Adds a line to `rounds.jsonl`."""
        self._append("rounds.jsonl", {"time": float(record.time), **as_json(record.values)})
        self._of_the_run.flush()  # a killed syncer shall leave as many lines as it has merged

    def recovered(self, record: Noted) -> None:
        """Adds a line to `recoveries.jsonl`."""
        self._append("recoveries.jsonl", {"time": float(record.time), **as_json(record.values)})

    def state(self, record: StateChanged) -> None:
        """Adds a line to `states.jsonl`."""
        line = {"time": float(record.time), "learner": record.learner, "state": record.state.value}
        self._append("states.jsonl", {**line, "chips": record.chips})
        self._of_the_run.flush()

    def died(self, record: LearnerDied) -> None:
        """Adds the traceback to the learner's `traceback.txt`, after those of earlier deaths."""
        text = f"died at {record.time}\n{record.traceback.rstrip()}\n\n"
        self._deaths.append(f"{record.learner}/traceback.txt", text.encode(errors="replace"))

    def flush(self) -> None:
        """Writes what is pending; what the disk refuses is tried again at the next flush."""
        self._steps.flush()
        self._deaths.flush()
        self._of_the_run.flush()

    def close(self) -> None:
        """Flushes and closes all files."""
        self._steps.close()
        self._deaths.close()
        self._of_the_run.close()

    def _append(self, name: str, line: dict[str, Any]) -> None:
        self._of_the_run.append(name, json.dumps(line).encode() + b"\n")
