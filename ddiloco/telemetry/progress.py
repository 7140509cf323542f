"""The terminal's output: one live line, or plain lines now and then without a terminal."""

from __future__ import annotations

import collections
import os
import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

from ddiloco.goodput.accounting import State
from ddiloco.telemetry.formatting import amount, clock, seconds
from ddiloco.telemetry.scalars import as_float
from ddiloco.telemetry.series import together
from ddiloco.telemetry.state import RunState
from ddiloco.telemetry.terminal import MAX_LINE_LENGTH, has_room, printable
from ddiloco.telemetry.waits import SHOWN_AFTER
from ddiloco.telemetry.watches import MANY

LIVE_EVERY = 0.25
PLAIN_EVERY = 10.0
WINDOW = 30.0  # seconds that a speed is taken over; more where these steps take longer
MIN_STEPS = 4
PLAIN_COLUMNS = 180  # of a line where there is no terminal


def glance(state: RunState, speed: RecentSpeed, now: float, clock_of: str = "") -> list[str]:
    """A run at a glance, what matters most first; what is not known yet is left out.

    `clock_of`: stands before its times, unless they are a wall clock's.
    """
    steps = together(one.performance for one in state.learners.values())
    figures, rounds, lines = steps.figures(), state.rounds, state.timelines
    peaks = [size for one in state.learners.values() for size in one.performance.peak_bytes.values()]
    last = rounds.recent[-1] if rounds.recent else {}
    throughput, remaining = speed.tokens_per_second(), speed.seconds_for(state.info.total_steps - state.step)
    elapsed = clock(0.0 if state.started is None else now - state.started)
    timing, skipped = state.timing, state.skipped_share
    parts = [
        f"step {state.step}/{state.info.total_steps}",
        _known("loss {:.3f}", state.recent_loss),
        _known("skipped {:.0%}", skipped if skipped > MANY else None),
        _known("{} tok/s", amount(throughput) if state.tokens and throughput is not None else None),
        "alive {}/{}".format(*lines.alive(state.info.num_learners)),
        f"{clock_of}{elapsed}" + ("" if remaining is None else f"<{clock(remaining)}"),
        _known("goodput {:.1%}", lines.goodput(now) if lines.window(now) else None),
        _known("merged {:.0%}", state.merged_share()),
        f"H {timing.settings['interval']} ({timing.reason})" if timing.settings else None,
        _known("MFU {:.1%}", figures["mfu"]),
        _known("p50 {}", seconds(figures["step_seconds_p50"]) if steps.seconds else None),
        _known("p99 {}", seconds(figures["step_seconds_p99"]) if steps.seconds else None),
        _known("data wait {:.1%}", figures["data_wait_share"]),
        _known("peak {:.1f} GiB", max(peaks) / 2**30 if peaks else None),
        _known("quorum {:d}", last.get("quorum")),
        _known("grace {:.0f} ms", 1e3 * as_float(last.get("grace_seconds", 0.0)) if last else None),
    ]
    return [part for part in parts if part is not None]


def _known(form: str, value: float | str | None) -> str | None:
    """The value in this form; None where there is none."""
    return None if value is None else form.format(value)


class Stall:
    """Why a run gets no further, from the states of its learners."""

    def __init__(self) -> None:
        self._tokens, self._since = -1, 0.0

    def reason(self, state: RunState, now: float) -> str | None:
        """None while any learner steps, or until SHOWN_AFTER seconds after the last step."""
        if state.tokens != self._tokens:
            self._tokens, self._since = state.tokens, now
        counts = state.timelines.states()
        if state.step >= state.info.total_steps and (late := state.unfinished()):
            return f"waiting for learner{'s' * (len(late) > 1)} {', '.join(map(str, late))} to end"
        if counts[State.STEPPING] or now < self._since + SHOWN_AFTER:
            return None
        others = [each for each in counts if each is not State.FINISHED]
        named = ", ".join(f"{counts[each]} {each.value.replace('_', ' ')}" for each in others)
        if not others:
            return None if counts else f"waiting {now - self._since:.0f} s for learners to join"
        return f"no step for {now - self._since:.0f} s (learners: {named})"


def fitted(parts: Sequence[str], columns: int) -> str:
    """As many of the parts as fit in fewer than `columns` characters."""
    shown = list(parts)
    while len("  ".join(shown)) >= columns and len(shown) > 1:
        shown.pop()
    return "  ".join(shown)[: max(0, columns - 1)]


class RecentSpeed:
    """The recent speed of a run, from samples of its step and its tokens."""

    def __init__(self) -> None:
        self._samples: collections.deque[tuple[float, int, int]] = collections.deque()

    def add(self, time: float, step: int, tokens: int) -> None:
        """Adds the counts at `time`; one before the last sample is ignored."""
        if self._samples and time <= self._samples[-1][0]:
            return
        if [sample[1:] for sample in [*self._samples][-2:]] == 2 * [(step, tokens)]:
            self._samples.pop()  # nothing has happened since the one before
        self._samples.append((time, step, tokens))
        while (
            len(self._samples) > 2
            and self._samples[1][0] <= time - WINDOW
            and self._samples[0][1] < step - MIN_STEPS
        ):
            self._samples.popleft()

    def tokens_per_second(self) -> float | None:
        """Tokens a second; None before the second sample."""
        if len(self._samples) < 2:
            return None
        (start, _, before), (end, _, after) = self._samples[0], self._samples[-1]
        return (after - before) / (end - start)

    def seconds_for(self, steps: int) -> float | None:
        """Seconds that `steps` more steps take; None before the first step."""
        if len(self._samples) < 2 or self._samples[-1][1] <= self._samples[0][1]:
            return None
        (start, before, _), (end, after, _) = self._samples[0], self._samples[-1]
        return max(0, steps) * (end - start) / (after - before)


class Progress:
    """Writes to the terminal. With CI=true in the environment only evaluations and problems are shown."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        """On a terminal one line that is overwritten; else a plain line every ten seconds."""
        self._out = out if out is not None else sys.stdout
        self._err = err if err is not None else sys.stderr
        self.quiet = os.environ.get("CI", "").lower() == "true"
        self.live = not self.quiet and self._out.isatty()
        self.every = LIVE_EVERY if self.live else PLAIN_EVERY
        self._live_line = ""

    def show(self, parts: Sequence[str]) -> None:
        """Draws the live line of these parts, or prints a plain one; to be called every `every` seconds."""
        if self.live and not has_room(self._out):
            return
        if self.live:
            line = fitted(parts, shutil.get_terminal_size((100, 24)).columns)
            self._out.write("\r" + line.ljust(len(self._live_line)))
            self._live_line = line
            self._out.flush()
        elif not self.quiet:
            self.print_line(fitted(parts, PLAIN_COLUMNS))

    def print_line(self, line: str) -> None:
        """Prints a line above the live one."""
        self._print(line, self._out)

    def print_unless_quiet(self, line: str) -> None:
        """Prints a line that is neither an evaluation nor a problem."""
        if not self.quiet:
            self.print_line(line)

    def warn(self, line: str) -> None:
        """Prints a line on stderr."""
        self._print(f"ddiloco: {line}", self._err)

    def end(self) -> None:
        """Leaves the live line where it is, and puts the cursor below it."""
        if self._live_line and has_room(self._out):
            self._out.write("\n")
            self._live_line = ""
        if has_room(self._out):
            self._out.flush()

    def _print(self, line: str, stream: TextIO) -> None:
        """A line that the stream has no room for is dropped, so that nothing waits for its reader."""
        if not has_room(stream) or not has_room(self._out):
            return
        line = printable(line, MAX_LINE_LENGTH)
        if self._live_line:
            self._out.write("\r" + " " * len(self._live_line) + "\r")
            self._out.flush()
        stream.write(line + "\n")
        if self._live_line:
            self._out.write(self._live_line)
            self._out.flush()
        stream.flush()
