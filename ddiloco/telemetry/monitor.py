"""The one thread that owns a run's files, figures and terminal; all others put records in its queue."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddiloco.goodput.accounting import State
from ddiloco.protocol.policy import MAX_AGE, TOO_OLD
from ddiloco.telemetry.alarms import Alarms
from ddiloco.telemetry.files import GrowingFiles, read_json, write_json
from ddiloco.telemetry.json_lines import about
from ddiloco.telemetry.plots import plot_loss
from ddiloco.telemetry.progress import PLAIN_EVERY, Progress, RecentSpeed, Stall, glance
from ddiloco.telemetry.records import (
    Alarm,
    Evaluated,
    Flush,
    LearnerDied,
    Noted,
    Record,
    RunInfo,
    StateChanged,
    StepDone,
    Stop,
    Transferred,
)
from ddiloco.telemetry.run_files import RunLines, recall
from ddiloco.telemetry.scalars import as_float, as_json
from ddiloco.telemetry.series import together
from ddiloco.telemetry.state import RunState, summarize
from ddiloco.telemetry.waits import PROCESS
from ddiloco.telemetry.writers import SERVICES, Aside, EventFiles, Metrics, Writer

POLL = 0.1  # seconds; draining in batches wakes the interpreter less often than a wake-up for each record
FLUSH_EVERY = 0.5
SUMMARY_EVERY = 2.0
BATCH = 256
CLOCKS_APART = 60.0  # seconds that another machine's clock may be off without an alarm
MAX_RECALL_SECONDS = 900.0  # seconds to read what earlier processes have left, a GiB of lines at most


class Monitor:
    """Receives records from any thread and writes the run's files (docs: the workdir's contract).

    Nothing that goes wrong in here ends the run: a file that cannot be written, or a record that cannot
    be read, is shown once on stderr and kept in the summary's `alarms`; files are tried again.
    """

    def __init__(
        self,
        workdir: pathlib.Path | str,
        run_info: RunInfo,
        log_every: int,
        *,
        clock: Callable[[], float] | None = time.time,
        resume: bool = False,
        writers: Sequence[str] = ("tensorboard",),
        check_owner: Callable[[], None] = lambda: None,
    ) -> None:
        """`log_every`: steps between metrics.

        `clock` gives the records' kind of time (unix seconds); None: that is virtual, and now is the latest
        record's. `resume`: earlier processes of the run have left counts in the workdir, which go on; the
        thread reads them first, while records wait in the queue. `check_owner` raises OSError if the workdir
        has become another run's.
        """
        self.queue: queue.SimpleQueue[Record] = queue.SimpleQueue()
        self._workdir = pathlib.Path(workdir)
        self._check_owner = check_owner
        self._clock = clock
        self._clock_of = "virtual " if clock is None else ""
        self._progress = Progress()
        self._alarms = Alarms(self._warn)
        self._files = GrowingFiles(self._workdir, self._alarms)
        self._lines = RunLines(self._files)
        self._state = RunState(run_info, clock() if clock and not resume else None)
        self._resume = resume
        self._recalled = threading.Event()
        self._metrics = Metrics([self._writer(name) for name in writers], log_every)
        self._speed, self._stall = RecentSpeed(), Stall()
        self._flushes: list[Flush] = []  # asked for and not done
        self._extra: dict[str, Any] = {}
        self._summary: dict[str, Any] = {}
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="monitor", daemon=True)
        self._every = {
            self._flush: FLUSH_EVERY,
            self._write_summary: SUMMARY_EVERY,
            self._show: self._progress.every,
            self._write_run_metrics: PLAIN_EVERY,
        }

    def _writer(self, name: str) -> Writer:
        if name == "tensorboard":
            return EventFiles(self._files)
        make = functools.partial(SERVICES[name], self._workdir, read_json(self._workdir / "config.json"))
        return Aside(make, lambda sentence: self.queue.put(Alarm(sentence, self._now())), name)

    def start(self) -> None:
        """Starts the monitor's thread."""
        self._thread.start()

    def stop(self, extra: Mapping[str, Any] | None = None, timeout: float = 60.0) -> dict[str, Any]:
        """Writes everything that is in the queue, draws the figure, and returns the summary.

        `extra` is added to the summary (`params_sha256`, `interrupted`). Waits until what earlier processes
        have left is read, without which there is no summary. `timeout` seconds later, as when a disk hangs,
        the latest summary is returned as it is, with an alarm. A second call returns the same.
        """
        if self._thread.ident is None:
            self.start()
        self._extra = {**self._extra, **(extra or {})}
        self.queue.put(Stop())
        self._wake.set()
        self._recalled.wait(MAX_RECALL_SECONDS)
        self._thread.join(timeout)
        if self._thread.is_alive():
            late = f"the monitor did not end within {timeout:g} seconds; the summary may be incomplete"
            return {**self._summary, "alarms": [*self._summary.get("alarms", []), late]}
        return self._summary

    def _draw(self) -> None:
        with PROCESS.on_progress_line():
            self._run()

    def _run(self) -> None:
        if self._resume:
            with self._alarms.guard("what earlier processes have left", Exception):
                recall(self._workdir, self._state, self._alarms)
            if self._state.started is None and self._clock is not None:
                self._state.started = self._clock()
        self._recalled.set()
        due = {action: time.monotonic() + every for action, every in self._every.items()}
        running = True
        while running:
            # The files are flushed in time, however many records wait.
            for _ in range(BATCH):
                try:
                    record = self.queue.get_nowait()
                except queue.Empty:
                    self._wake.wait(POLL)
                    break
                if isinstance(record, Stop):
                    running = False
                    break
                guard = self._alarms.guard(f"a {type(record).__name__} record was not used", Exception)
                with guard, about(learner=_learner(record), round=self._state.rounds.count):
                    self._take(record)
            for action, moment in due.items():
                if time.monotonic() >= moment or (action == self._show and PROCESS.not_shown()):
                    due[action] = time.monotonic() + self._every[action]
                    self._do(action)
        self._end()

    def _take(self, record: Record) -> None:
        record = self._in_time(record)
        match record:
            case Flush():
                self._flushes.append(record)
                return
            case Alarm():
                self._alarms.raise_once(record.sentence, record.sentence)
                return
            case StateChanged(state=State.FAILED) if record.learner in self._state.finished:
                return
            case StateChanged(state=State.FAILED):
                since = self._state.timelines.failed_since(record.learner, record.time)
                record = dataclasses.replace(record, time=since)
            case Evaluated():
                statistics = {name: as_float(value) for name, value in record.statistics.items()}
                record = dataclasses.replace(record, loss=as_float(record.loss), statistics=statistics)
        was_away = isinstance(record, Noted) and record.values.get("learner") in self._state.away
        self._state.apply(record)
        self._lines.write(record, self._state)
        match record:
            case StepDone():
                self._metrics.step(record)
                if not record.skipped and self._state.learners[record.learner].not_finite:
                    loss, learner = as_float(record.metrics["loss"]), f"learner {record.learner}"
                    sentence = f"{learner}: the loss is {loss} at step {record.step}"
                    self._alarms.raise_once(f"loss of {record.learner}", sentence)
            case Noted():
                self._noted(record, was_away)
            case Evaluated():
                self._evaluated(record)
            case LearnerDied():
                self._print(f"learner {record.learner} died: {self._state.events[-1]['reason']}")

    def _in_time(self, record: Record) -> Record:
        """The record, not before the run and not in the future: another machine's clock may be wrong."""
        if isinstance(record, Transferred | Flush | Stop):
            return record
        if self._clock is None or self._state.started is None:
            return record
        time = min(max(record.time, self._state.started), self._now())
        if abs(time - record.time) > CLOCKS_APART:
            whose = f"learner {record.learner}" if hasattr(record, "learner") else "a learner"
            self._alarms.raise_once(f"clock of {whose}", f"the clock of {whose} is wrong: {record.time:.0f}")
        return dataclasses.replace(record, time=time)

    def _look_for_left_out(self) -> None:
        """An alarm for each learner that trains in vain."""
        for learner, share in self._state.left_out().items():
            sentence = f"learner {learner}: {share:.0%} of its work is merged, less than half of the others'"
            self._alarms.raise_once(f"left out {learner}", sentence)

    def _noted(self, record: Noted, was_away: bool) -> None:
        learner, values = record.values.get("learner"), record.values
        finished = learner in self._state.finished
        match record.name:
            case "round":
                self._metrics.round(record)
                self._look_for_left_out()
            case "snapshot_given_up":
                self._print(f"snapshot {values.get('number')} given up: {values.get('reason')}")
            case "clock_ahead":
                speed = f"its clock goes {values['speed']:.0f} times as fast as others step"
                hint = "with a sync.quorum of 2 or more it would not hurry them"
                self._alarms.raise_once(f"speed of {learner}", f"learner {learner}: {speed}; {hint}")
            case "drop" if values.get("reason") == TOO_OLD:
                refused = self._state.rounds.left_out[learner] > 0
                why = "the guard leaves out its offers" if refused else "its link to the syncer is too slow"
                lost = f"unmerged work is overwritten, over {MAX_AGE} versions old"
                sentence = f"learner {learner}: {lost}: {why}"
                self._alarms.raise_once(f"overwritten {learner}", sentence)
            case "learner_lost" if not finished:
                self._print(f"learner {learner} lost: {values.get('reason', 'no reason given')}")
            case "learner_silent" if not finished:
                self._print(f"learner {learner} is silent; the others continue")
            case "learner_returned":
                self._print(f"learner {learner} sends messages again", unless_quiet=True)
            case "learner_ready" if was_away:
                self._print(f"learner {learner} is back", unless_quiet=True)

    def _evaluated(self, record: Evaluated) -> None:
        self._metrics.evaluated(record)
        taken = f"{record.time - (self._state.started or 0.0):.0f} {self._clock_of}s"
        accuracy = record.statistics.get("accuracy")
        shown = "" if accuracy is None else f"  accuracy {accuracy:.1%}"
        self._print(f"step {record.step}: held-out loss {record.loss:.4f}{shown}  ({taken})")
        if not math.isfinite(record.loss):
            found = f"held-out loss is {record.loss} from step {record.step} on: the global model is spoilt"
            self._alarms.raise_once("held-out loss", f"{found}, or its data are")

    def _now(self) -> float:
        latest = self._state.last_time
        if self._clock is not None:
            return max(self._clock(), latest)
        return latest if math.isfinite(latest) else 0.0

    def _flush(self) -> None:
        written = self._files.flush()
        if any(flush.summary for flush in self._flushes):
            self._write_summary()
        for flush in self._flushes:
            if written or flush.summary:  # else what led to a snapshot may be nowhere
                flush.done()
        self._flushes = [] if written else [flush for flush in self._flushes if not flush.summary]

    def _write_summary(self) -> None:
        summary = summarize(self._state, self._now(), self._alarms.sentences)
        self._summary = {**summary, **as_json(self._extra)}
        path = self._workdir / "summary.json"
        with self._alarms.guard(str(path)):
            self._check_owner()
            write_json(path, self._summary)

    def _write_run_metrics(self) -> None:
        now, lines = self._now(), self._state.timelines
        if lines.window(now) is not None:
            values = {
                "goodput": lines.goodput(now),
                "uptime": lines.uptime(now),
                "alive": lines.alive(self._state.info.num_learners)[0],
                "merged_share": self._state.merged_share(),
                **{f"merged_share/{m}": share for m, share in self._state.merged_shares().items()},
                **together(one.performance for one in self._state.learners.values()).figures(),
            }
            self._metrics.run(self._state.step, now, values)

    def _show(self) -> None:
        now, state = self._now(), self._state
        self._speed.add(now, state.step, state.tokens)
        step, *others = glance(state, self._speed, now, self._clock_of)
        reason = PROCESS.reason() or (self._stall.reason(state, now) if self._clock else None)
        with self._terminal():
            self._progress.show([step, *([reason] if reason else []), *others])

    def _print(self, line: str, *, unless_quiet: bool = False) -> None:
        with self._terminal():
            (self._progress.print_unless_quiet if unless_quiet else self._progress.print_line)(line)

    def _warn(self, sentence: str) -> None:
        alarm = Alarm(sentence, self._now())
        self._state.apply(alarm)
        self._lines.write(alarm, self._state)
        # An alarm that cannot be shown is still in the summary.
        with contextlib.suppress(OSError, ValueError):
            self._progress.warn(sentence)

    def _terminal(self) -> contextlib.AbstractContextManager[None]:
        return self._alarms.guard("the terminal", OSError, ValueError)

    def _end(self) -> None:
        # The summary comes first: a kill during matplotlib's import then loses only the figure.
        shown = (self._show, self._write_run_metrics, self._end_writers, self._flush, self._files.close)
        for action in (*shown, self._write_summary, self._plot, self._write_summary):
            self._do(action)
        with self._terminal():
            self._progress.end()

    def _end_writers(self) -> None:
        """Waits for the services; their failures are alarms like any other."""
        self._metrics.close()
        while not self.queue.empty():
            if isinstance(late := self.queue.get(), Alarm):
                self._take(late)

    def _plot(self) -> None:
        plot_loss(self._workdir / "loss.png", self._state)

    def _do(self, action: Callable[[], None]) -> None:
        with self._alarms.guard(f"the monitor's {action.__name__.strip('_')}", Exception):
            action()


def _learner(record: Record) -> int | None:
    """The learner that a record is about."""
    if isinstance(record, Noted):
        return record.values.get("learner")
    return getattr(record, "learner", None)
