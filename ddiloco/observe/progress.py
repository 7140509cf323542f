"""What the terminal shows: one live line, or plain lines now and then where there is no terminal."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import shutil
import sys
from typing import TextIO

from ddiloco.observe.terminal import LONGEST_LINE, has_room, printable

LIVE_EVERY = 0.25
PLAIN_EVERY = 10.0
PLAIN_COLUMNS = 180  # of a line where there is no terminal


@dataclasses.dataclass(frozen=True)
class Status:
    """A run at a glance; None is shown as a dash."""

    step: int
    total_steps: int
    loss: float | None  # nats per token
    tokens_per_second: float | None
    alive: int  # learners that are not dead; those that have finished count
    num_learners: int
    merged_share: float | None  # of what learners trained, averaged over fragments
    quorum: int | None  # of the last merge
    grace_seconds: float | None  # that the last merge used
    goodput: float | None  # in [0, 1]
    elapsed: float  # seconds
    remaining: float | None  # seconds
    mfu: float | None = None  # in [0, 1]; this and what follows is left out where it is None
    step_seconds: float | None = None  # the median
    slow_step_seconds: float | None = None  # the 99th percentile
    data_wait_share: float | None = None  # of the time of steps
    peak_bytes: int | None = None  # of the device that had most in use


def format_status(status: Status, columns: int) -> str:
    """The status in fewer than `columns` characters; on a narrow terminal the last figures are left out."""
    left = "-" if status.remaining is None else _clock(status.remaining)
    parts = [
        f"step {status.step}/{status.total_steps}",
        f"loss {_shown(status.loss, '.3f')}",
        f"{_amount(status.tokens_per_second)} tok/s",
        f"alive {status.alive}/{status.num_learners}",
        f"{_clock(status.elapsed)}<{left}",
        f"goodput {_shown(status.goodput, '.1%')}",
        f"merged {_shown(status.merged_share, '.0%')}",
        *_measured(status),
        f"quorum {_shown(status.quorum, 'd')}",
        f"grace {_shown(None if status.grace_seconds is None else 1e3 * status.grace_seconds, '.0f')} ms",
    ]
    while len("  ".join(parts)) >= columns and len(parts) > 1:
        parts.pop()
    return "  ".join(parts)[: max(0, columns - 1)]


def _measured(status: Status) -> list[str]:
    """What is known of the steps, and nothing of the rest."""
    parts = []
    if status.mfu is not None:
        parts.append(f"MFU {status.mfu:.1%}")
    if status.step_seconds is not None and status.slow_step_seconds is not None:
        parts.append(f"p50 {_duration(status.step_seconds)}  p99 {_duration(status.slow_step_seconds)}")
    if status.data_wait_share is not None:
        parts.append(f"data wait {status.data_wait_share:.1%}")
    if status.peak_bytes is not None:
        parts.append(f"peak {status.peak_bytes / 2**30:.1f} GiB")
    return parts


class Pace:
    """How fast a run has recently been, from samples of its step and its tokens."""

    def __init__(self, window: float = 30.0) -> None:
        """`window`: seconds to average over."""
        self._window = window
        self._samples: collections.deque[tuple[float, int, int]] = collections.deque()

    def add(self, time: float, step: int, tokens: int) -> None:
        """Adds the counts at `time`; one before the last sample is ignored."""
        if self._samples and time <= self._samples[-1][0]:
            return
        self._samples.append((time, step, tokens))
        while len(self._samples) > 2 and self._samples[1][0] <= time - self._window:
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

    def __init__(self, live: bool, out: TextIO | None = None, err: TextIO | None = None) -> None:
        """With `live` and a terminal, one line that is overwritten; else a plain line every ten seconds."""
        self._out = out if out is not None else sys.stdout
        self._err = err if err is not None else sys.stderr
        self.quiet = os.environ.get("CI", "").lower() == "true"
        self.live = live and not self.quiet and self._out.isatty()
        self.every = LIVE_EVERY if self.live else PLAIN_EVERY
        self._drawn = ""

    def show(self, status: Status) -> None:
        """Draws the live line again, or prints a plain one; to be called every `every` seconds."""
        if self.live and not has_room(self._out):
            return
        if self.live:
            line = format_status(status, shutil.get_terminal_size((100, 24)).columns)
            self._out.write("\r" + line.ljust(len(self._drawn)))
            self._drawn = line
            self._out.flush()
        elif not self.quiet:
            self.say(format_status(status, PLAIN_COLUMNS))

    def say(self, line: str) -> None:
        """Prints a line above the live one."""
        self._print(line, self._out)

    def news(self, line: str) -> None:
        """Prints a line that is neither an evaluation nor a problem."""
        if not self.quiet:
            self.say(line)

    def warn(self, line: str) -> None:
        """Prints a line on stderr."""
        self._print(f"ddiloco: {line}", self._err)

    def end(self) -> None:
        """Leaves the live line where it is, and puts the cursor below it."""
        if self._drawn and has_room(self._out):
            self._out.write("\n")
            self._drawn = ""
        if has_room(self._out):
            self._out.flush()

    def _print(self, line: str, stream: TextIO) -> None:
        """A line whose stream has no room for it is lost: nothing waits for a reader."""
        if not has_room(stream) or not has_room(self._out):
            return
        line = printable(line, LONGEST_LINE)
        if self._drawn:
            self._out.write("\r" + " " * len(self._drawn) + "\r")
            self._out.flush()
        stream.write(line + "\n")
        if self._drawn:
            self._out.write(self._drawn)
            self._out.flush()
        stream.flush()


def _shown(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _amount(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02d}h"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"
