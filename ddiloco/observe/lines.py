"""What a run leaves about its learners and rounds: a line for each step and merge, tracebacks of deaths.

Tools rely on `learners/<id>/steps.jsonl`: {"time": seconds, "step": the learner's clock, "tokens": of
that step, "loss": in nats per token, null if it is not finite, "skipped": 1 if the step changed nothing (its
tokens are 0)}, at most a second behind; of a process without those lost on their way (`records_lost`).
`rounds.jsonl` has a line for each merge: {"time", "step", "fragment", "version", "learners" (in the merge),
"tokens", ...};
`states.jsonl` one for each change of a learner's state; `recoveries.jsonl` one for each process of a learner
that joined, and where its inner optimizer state came from; `events.jsonl` one for each alarm, and for what
else is rare: {"time", "event": its name, ...}. A run that is resumed in the same folder adds to them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ddiloco.observe.files import GrowingFiles
from ddiloco.observe.records import LearnerDied, Noted, StateChanged, StepDone
from ddiloco.observe.scalars import as_float, as_json


class LineFiles:
    """Adds to the files; lines of rounds and states are written at once, so that a kill loses none."""

    def __init__(self, files: GrowingFiles) -> None:
        """`files` are those of the workdir."""
        self._files = files

    def add(
        self, name: str, time: float, values: Mapping[str, Any], at_once: bool = False, bounded: bool = True
    ) -> None:
        """Adds a line to the file of that name."""
        line = json.dumps({"time": float(time), **as_json(values)})
        self._files.append(name, line.encode() + b"\n", at_once, bounded)

    def step(self, record: StepDone) -> None:
        """Adds a line to the learner's `steps.jsonl`."""
        line: dict[str, Any] = {"step": int(record.step), "tokens": int(record.tokens)}
        if "loss" in record.metrics:
            line["loss"] = as_float(record.metrics["loss"])
        if record.skipped:
            line["skipped"] = 1
        self.add(f"learners/{record.learner}/steps.jsonl", record.time, line)

    def round(self, record: Noted, counts: Mapping[str, int]) -> None:
        """Adds a line to `rounds.jsonl`, with the bytes that learners have moved so far."""
        moved = {name: counts[name] for name in ("bytes_sent", "bytes_received")}
        self.add("rounds.jsonl", record.time, {**record.values, **moved}, at_once=True, bounded=False)

    def state(self, record: StateChanged) -> None:
        """Adds a line to `states.jsonl`."""
        line = {"learner": record.learner, "state": record.state.value, "chips": record.chips}
        self.add("states.jsonl", record.time, line, at_once=True)

    def event(self, name: str, time: float, values: Mapping[str, Any]) -> None:
        """Adds a line to `events.jsonl`."""
        self.add("events.jsonl", time, {"event": name, **values})

    def died(self, record: LearnerDied) -> None:
        """Adds the traceback to the learner's `traceback.txt`, after those of earlier deaths."""
        text = f"died at {record.time}\n{record.traceback.rstrip()}\n\n"
        name = f"learners/{record.learner}/traceback.txt"
        self._files.append(name, text.encode(errors="replace"), bounded=True)
