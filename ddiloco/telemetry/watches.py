"""Observers of a process's records: its health, a profile, and skipped steps."""

from __future__ import annotations

import collections
import http.server
import os
import pathlib
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ddiloco.config import HUNG, ConfigError
from ddiloco.goodput.accounting import State
from ddiloco.telemetry.records import LOST, READY, Alarm, LearnerDied, Noted, RunInfo, StateChanged, StepDone

TakeRecord = Callable[[Any], None]


class Watch:
    """Sees the records of a process as they pass, whichever threads they come from."""

    def watching(self, record: TakeRecord) -> TakeRecord:
        """`record`, with what passes through it seen."""

        def watch(one: Any) -> None:
            record(one)
            self._see(one, record)

        return watch

    def close(self) -> None:
        """Nothing more will pass."""

    def _see(self, one: Any, record: TakeRecord) -> None:
        """A record has passed; others may follow it."""
        raise NotImplementedError


SLOWEST = 10.0  # times the median of the last steps
SHORTEST = 600.0  # seconds without a step that mean nothing yet to an engine


class Health(Watch):
    """The health of this process.

    It is ready once it has been said to be, and lives unless a learner in the middle of its steps takes no
    further one for more than `shortest` seconds and ten times the median of the last ones, before the first
    one SHORTEST: then its devices hang, or on TPUs another host of it is gone; only a restart helps.
    """

    def __init__(self, shortest: float = SHORTEST, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds that never jump."""
        self.ready = threading.Event()
        self._shortest, self._clock = shortest, clock
        self._lock = threading.Lock()
        self._seconds: collections.deque[float] = collections.deque(maxlen=31)  # of the last steps
        self._since: float | None = None  # when the step under way began

    def _see(self, one: Any, record: TakeRecord) -> None:
        """A learner that steps is ready."""
        del record
        with self._lock:
            now = self._clock()
            if isinstance(one, StateChanged):  # waiting for the syncer is no hang
                self._since = now if one.state is State.STEPPING else None
            elif isinstance(one, StepDone):
                if self._since is not None:
                    self._seconds.append(now - self._since)
                self._since = now
                self.ready.set()

    def close(self) -> None:
        """No further step is to be expected."""
        self._since = None

    def hanging(self) -> float | None:
        """Seconds since the last step if they are too many; None: all is well."""
        with self._lock:
            if self._since is None:
                return None
            waited = self._clock() - self._since
            long = SLOWEST * statistics.median(self._seconds) if self._seconds else SHORTEST
        return waited if waited > max(self._shortest, long) else None


class Announcement(Watch):
    """Raises an alarm with the first record."""

    def __init__(self, sentence: str) -> None:
        self._sentence: str | None = sentence

    def _see(self, one: Any, record: TakeRecord) -> None:
        del one
        sentence, self._sentence = self._sentence, None
        if sentence is not None:
            record(Alarm(sentence, time.time()))


class HangWatch(Health):
    """Ends this process once a step hangs, with the stacks of its threads in a file."""

    def __init__(self, timeout: float, name: str, stacks: pathlib.Path | None) -> None:
        """`timeout`: seconds, as Health's `shortest`. `stacks`: the file; None: on stderr."""
        super().__init__(timeout)
        self._timeout, self._name, self._stacks = timeout, name, stacks
        self._over = threading.Event()
        threading.Thread(target=self._look, name="hang-watch", daemon=True).start()

    def close(self) -> None:
        """Ends the thread."""
        super().close()
        self._over.set()

    def _look(self) -> None:
        while not self._over.wait(min(1.0, self._timeout / 20)):
            waited = self.hanging()
            if waited is not None:
                where = write_stacks(self._stacks)
                print(f"error: {self._name}: a step hangs, for {waited:.1f} s; {where}", file=sys.stderr)
                sys.stderr.flush()
                os._exit(HUNG)


def write_stacks(path: pathlib.Path | None) -> str:
    """Writes the stacks of this process's threads, on stderr without a path; says where they are."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = [time.strftime("%Y-%m-%d %H:%M:%S\n")]
    for thread, frame in sys._current_frames().items():
        lines += [f"\nthread {names.get(thread, thread)}\n", *traceback.format_stack(frame)]
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(lines))
            return f"its stacks are in {path}"
        except OSError:  # of a full disk
            pass
    print("".join(lines), file=sys.stderr)
    return "its stacks are above"


def serve(address: str, health: Health) -> http.server.ThreadingHTTPServer:
    """Answers GET /live and GET /ready at HOST:PORT with 200, or 503 and a line that says why not.

    It ends with the process. Raises ConfigError where the address is not available.
    """

    class Answers(http.server.BaseHTTPRequestHandler):
        timeout = 5.0  # seconds for a request to come

        def do_GET(self) -> None:
            waited = health.hanging()
            if self.path not in ("/live", "/ready"):
                self._respond(404, "ask for /live or /ready")
            elif waited is not None:
                self._respond(503, f"no step for {waited:.0f} s")
            elif self.path == "/ready" and not health.ready.is_set():
                self._respond(503, "not ready yet")
            else:
                self._respond(200, "ok")

        def _respond(self, code: int, line: str) -> None:
            body = f"{line}\n".encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # a line for each probe would be noise
            del format, args

    host, _, port = address.rpartition(":")
    try:
        server = http.server.ThreadingHTTPServer((host.strip("[]"), int(port)), Answers)
    except OSError as error:
        raise ConfigError(f"health: {address}: cannot be listened on: {error.strerror}") from None
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    return server


PROFILE_FOLDER = "profile"  # of a run, in its workdir


def _profiler() -> Any:
    import jax  # not of a process that only shows a run

    return jax.profiler


class StepProfile(Watch):
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

    def _see(self, one: Any, record: TakeRecord) -> None:
        """Steps begin and end the trace."""
        del record
        if isinstance(one, StepDone) and self._writing is None:
            self._stepped(one)

    def close(self) -> None:
        """Ends a trace whose last step has not come, and waits until the files are written."""
        if self._learner is not None and self._writing is None:
            self._end()
        if self._writing is not None:
            self._writing.join()

    def _stepped(self, done: StepDone) -> None:
        if self._learner is None and self._first - 1 <= done.step < self._last:
            self._learner = done.learner
            _profiler().start_trace(self._folder, create_perfetto_trace=True)
        elif self._learner == done.learner and done.step >= self._last:
            self._end()

    def _end(self) -> None:
        # Not in the learner's thread, which writing the files would hold up for seconds.
        self._writing = threading.Thread(target=self._write, name="profile")
        self._writing.start()

    def _write(self) -> None:
        _profiler().stop_trace()
        found = sorted(self._folder.rglob("perfetto_trace.json.gz"))
        self._print_line(
            f"steps {self._first} to {self._last} are profiled in {self._folder}: open "
            f"{found[-1] if found else self._folder} at https://ui.perfetto.dev, or all of it by "
            f"tensorboard --logdir={self._folder} (with pip install xprof)"
        )


MANY = 0.1
"""Share of an interval's steps of a learner; more that are skipped are an alarm."""

NEARLY_ALL = 0.9
"""Share of an interval's steps; where every learner skips as many, the run learns nothing, and ends."""

MIN_STEPS = 10
"""Of the steps by which a run is ended: where intervals are shorter, one bad batch must not end it."""

REMEDY = "try a lower inner.learning_rate, more inner.warmup_steps, a smaller inner.clip_norm, or other data"


class SkipWatch(Watch):
    """Ends a run of which every learner skips nearly all steps, and raises an alarm for each that skips many.

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

    def _see(self, one: Any, record: TakeRecord) -> None:
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

    def _of(self, learner: int) -> collections.deque[tuple[int, bool]]:
        return self._last.setdefault(learner, collections.deque(maxlen=self._judged))

    def _step_done(self, step: StepDone, record: TakeRecord) -> None:
        last = self._of(step.learner)
        # Dropped steps have an alarm of their own.
        skipped = step.skipped and "corrupt" not in step.metrics
        last.append((step.step, skipped))
        if not skipped:
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
