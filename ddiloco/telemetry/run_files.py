"""The records of a run as lines of its files: written by its monitor, read on a restart and for its page.

Tools rely on `learners/<id>/steps.jsonl`: {"time": seconds, "step": the learner's clock, "tokens": of
that step, "loss": in nats per token, null if it is not finite, "skipped": 1 if the step changed nothing (its
tokens are 0), "updates": of fragments, applied since the step before, if there were any}, at most a second
behind; of a process without those lost on their way (`records_lost`).
`rounds.jsonl` has a line for each merge: {"time", "step", "fragment", "version", "learners" (in the merge),
"tokens", ...}; `states.jsonl` one for each change of a learner's state; `recoveries.jsonl` one for each
process of a learner that joined, and where its inner optimizer state came from; `events.jsonl` one for each
alarm, and for what else is rare: {"time", "event": its name, ...}. A run that is resumed in the same folder
adds to them.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from ddiloco.goodput.accounting import State
from ddiloco.telemetry.alarms import Alarms
from ddiloco.telemetry.files import GrowingFiles, read_json
from ddiloco.telemetry.records import (
    Alarm,
    LearnerDied,
    Noted,
    Record,
    RunInfo,
    StateChanged,
    StepDone,
    event_line,
)
from ddiloco.telemetry.scalars import as_float, as_json
from ddiloco.telemetry.state import RunState
from ddiloco.telemetry.trimming import PLAN

CHUNK = 1 << 18  # bytes of a file that are read at a time
LATEST = sys.float_info.max  # seconds, of all that is known; of nothing more it is infinite
MAX_LAG = 1.5  # seconds that steps may come later into their file than rounds into theirs
ALIVE = 30.0  # seconds for which a run that does not refresh its summary is still taken to go on


class RunLines:
    """Adds to the files; lines of rounds and states are written at once, so that a kill loses none."""

    def __init__(self, files: GrowingFiles) -> None:
        """`files` are those of the workdir."""
        self._files = files

    def write(self, record: Record, state: RunState) -> None:
        """Adds the lines of a record that `state` has applied."""
        match record:
            case StepDone():
                line: dict[str, Any] = {"step": int(record.step), "tokens": int(record.tokens)}
                if "loss" in record.metrics:
                    line["loss"] = as_float(record.metrics["loss"])
                if record.skipped:
                    line["skipped"] = 1
                if "updates" in record.metrics:
                    line["updates"] = int(record.metrics["updates"])
                self._add(f"learners/{record.learner}/steps.jsonl", record.time, line)
            case StateChanged():
                line = {"learner": record.learner, "state": record.state.value, "chips": record.chips}
                self._add("states.jsonl", record.time, line, at_once=True)
            case Noted("round"):
                self._add("rounds.jsonl", record.time, state.rounds.recent[-1], at_once=True, bounded=False)
            case Noted("recovered"):
                self._add("recoveries.jsonl", record.time, record.values)
            case LearnerDied():
                text = f"died at {record.time}\n{record.traceback.rstrip()}\n\n"
                name = f"learners/{record.learner}/traceback.txt"
                self._files.append(name, text.encode(errors="replace"), bounded=True)
        if (event := event_line(record)) is not None:
            self._add("events.jsonl", event["time"], event)

    def _add(
        self, name: str, time: float, values: Mapping[str, Any], at_once: bool = False, bounded: bool = True
    ) -> None:
        line = json.dumps({**as_json(values), "time": float(time)})
        self._files.append(name, line.encode() + b"\n", at_once, bounded)


def _step(learner: int) -> Callable[[Mapping[str, Any]], Record]:
    def read(line: Mapping[str, Any]) -> Record:
        metrics = {name: line[name] for name in ("loss", "skipped", "updates") if name in line}
        if metrics.get("loss", 0.0) is None:
            metrics["loss"] = math.nan
        return StepDone(learner, line["step"], line["time"], line.get("tokens", 0), metrics)

    return read


def _state(line: Mapping[str, Any]) -> Record:
    return StateChanged(int(line["learner"]), State(line["state"]), line["time"], line.get("chips"))


def _event(line: Mapping[str, Any]) -> Record:
    match line["event"]:
        case "alarm":
            return Alarm(str(line["alarm"]), line["time"])
        case "died":
            return LearnerDied(int(line["learner"]), line["time"], str(line.get("reason")))
        case name:
            values = {key: value for key, value in line.items() if key not in ("time", "event")}
            return Noted(str(name), values, line["time"])


_FILES: Mapping[str, Callable[[Mapping[str, Any]], Record]] = {
    "states.jsonl": _state,
    "events.jsonl": _event,
    "rounds.jsonl": lambda line: Noted("round", line, line["time"]),
    "recoveries.jsonl": lambda line: Noted("recovered", line, line["time"]),
}
"""By file, the record of a line; of the same time, steps are first, and then these in this order."""


class RunFiles:
    """A run as read from its files; `read` continues from where it was, in bounded memory.

    Records are applied in the order of their times, so that a merge finds each learner's steps until then.
    Lines that cannot be read are skipped.

    Attributes:
      state: what the lines add up to.
      summary: `summary.json`, of what has no lines.
      config, environment, plan: likewise.
      going_on: whether the run has not ended.
      whole: whether all that there was has been read.
    """

    def __init__(self, workdir: pathlib.Path) -> None:
        self.workdir = workdir
        self._begin()

    def _begin(self) -> None:
        self.summary: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.environment: dict[str, Any] = {}
        self.plan: dict[str, Any] = {}
        self.state = RunState(RunInfo("", 0, 0, 0, 0, 0, {}))
        self.going_on = self.whole = False
        self._tails = {name: LineTail(self.workdir / name) for name in _FILES}
        self._steps: dict[int, LineTail] = {}
        self._summary_mark: tuple[int, int] | None = None

    @property
    def _in_real_time(self) -> bool:
        """Whether the run is in progress, by this machine's clock."""
        return self.going_on and self.config.get("driver") != "virtual"

    @property
    def now(self) -> float:
        """The time of the last line, or of the clock while a run in real time goes on; 0 before the first."""
        clock, last = time.time() if self._in_real_time else -math.inf, self.state.last_time
        return max(clock, last) if math.isfinite(last) else 0.0

    @property
    def started(self) -> float:
        """Start of the run; 0 before that."""
        return self.state.slots.start if self.state.slots is not None else 0.0

    def read(self, budget: float = math.inf) -> bool:
        """Reads new lines, for about `budget` seconds; returns whether that was all."""
        ends = time.monotonic() + budget
        try:
            self._read_summary()
            latest = time.time() - MAX_LAG if self._in_real_time else LATEST
            self.whole = self.fold(latest, ends)
        except (Replaced, FileNotFoundError):  # another run has begun, or is about to, in the folder
            self._begin()
        return self.whole

    def fold(self, latest_round: float = LATEST, ends: float = math.inf) -> bool:
        """Applies the new lines to `state`, of rounds those up to a time; returns whether all, before `ends`.

        Raises Replaced: another run has its files there.
        """
        self._find_learners()
        steps = [(tail, _step(learner), LATEST) for learner, tail in sorted(self._steps.items())]
        others = [(self._tails[name], read, LATEST) for name, read in _FILES.items()]
        sources = [*steps, *others]
        rounds = len(steps) + [*_FILES].index("rounds.jsonl")
        sources[rounds] = (*sources[rounds][:2], latest_round)
        for tail, *_ in sources:
            tail.look()
        following = [(tail.time, place) for place, (tail, _, most) in enumerate(sources) if tail.time <= most]
        heapq.heapify(following)
        apply, count = self.state.apply, 0
        while following:
            with contextlib.suppress(LookupError, ValueError, TypeError, AttributeError):  # of one line
                while following:
                    count += 1
                    if count % 256 == 0 and time.monotonic() > ends:
                        return False
                    place = following[0][1]
                    tail, read, most = sources[place]
                    line = tail.take()
                    if tail.time <= most:
                        heapq.heapreplace(following, (tail.time, place))
                    else:
                        heapq.heappop(following)
                    apply(read(line))
        return time.monotonic() <= ends

    def _read_summary(self) -> None:
        """Reads summary and config again where they have changed."""
        path = self.workdir / "summary.json"
        try:
            status = path.stat()
        except OSError:
            self.going_on = False
            return
        mark = (status.st_ino, status.st_mtime_ns)
        if mark != self._summary_mark:
            self.summary, self._summary_mark = read_json(path), mark
            self.plan = read_json(self.workdir / PLAN)
        over = self.summary.get("finished") or self.summary.get("interrupted") or "driver" in self.summary
        self.going_on = not over and time.time() - status.st_mtime < ALIVE
        if not self.config:
            self.config = read_json(self.workdir / "config.json")
            self.environment = read_json(self.workdir / "environment.json")

    def _find_learners(self) -> None:
        folders = [path for path in self.workdir.glob("learners/*") if path.name.isdigit()]
        known = {int(path.name) for path in folders} | set(range(int(self.summary.get("num_learners") or 0)))
        for number in known - self._steps.keys():
            self.state.learner(number)
            self._steps[number] = LineTail(self.workdir / "learners" / str(number) / "steps.jsonl")


def recall(workdir: pathlib.Path, state: RunState, alarms: Alarms) -> None:
    """Adds what is in the files of earlier processes to the state and the alarms of this one.

    Steps, tokens, losses, states, rounds and recoveries are complete. Counts without lines of their own, such
    as bytes, the evaluations and the alarms come from the last summary, at most 2 seconds old. Of a learner
    that the run no longer has only its steps count, with tokens and losses. Lines that cannot be read, such
    as a torn last one, are passed over.
    """
    files = RunFiles(workdir)
    files.state = state
    files.fold()
    summary = read_json(workdir / "summary.json")
    state.recall(summary)
    alarms.recall(summary.get("alarms", []))


def is_over(workdir: pathlib.Path, steps: int) -> bool:
    """Whether the run has reached these steps, with everything saved."""
    summary = read_json(workdir / "summary.json")
    step = summary.get("step")
    return summary.get("finished") is True and isinstance(step, int) and step >= steps


class Replaced(Exception):
    """The file is another one, or shorter than what was read of it, which no longer counts."""


class LineTail:
    """The lines of a .jsonl file that grows, one after the other in their order."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._offset, self._inode = 0, 0
        self._ahead: collections.deque[dict[str, Any]] = collections.deque()
        self.time = math.inf  # of the next line, once `look` has found one

    def look(self) -> None:
        """Reads on, if no line is left; raises Replaced."""
        if self._ahead:
            return
        data = self._more()
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) >= CHUNK:
            whole = len(data)  # no line is that long: it is skipped
        self._offset += whole
        self._ahead.extend(_values(data[:whole].splitlines()))
        self._next()

    def take(self) -> dict[str, Any]:
        """The next line; `time` must not be infinite."""
        line = self._ahead.popleft()
        if self._ahead:
            self._next()
        else:
            self.look()
        return line

    def _more(self) -> bytes:
        """Up to CHUNK bytes from where whole lines have been read to."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if self._offset and (status.st_ino, status.st_size < self._offset) != (self._inode, False):
                    raise Replaced(str(self._path))
                self._inode = status.st_ino
                file.seek(self._offset)
                return file.read(CHUNK)
        except OSError:
            if self._offset:
                raise Replaced(str(self._path)) from None
            return b""

    def _next(self) -> None:
        self.time = self._ahead[0]["time"] if self._ahead else math.inf


def _values(lines: list[bytes]) -> list[dict[str, Any]]:
    """Of each line that is an object with a time; all at once, or one by one where one is torn."""
    try:
        values = json.loads(b"[" + b",".join(lines) + b"]")
    except ValueError:
        values = [_value(line) for line in lines]
    return [value for value in values if isinstance(value, dict) and _is_time(value.get("time"))]


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and -LATEST <= value <= LATEST


def _value(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
