"""Virtual time: scheduled calls, a clock that jumps from one to the next, and alarms."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, NamedTuple


class _Entry(NamedTuple):
    time: float
    order: int  # decides among equal times
    call: Callable[..., None]
    arguments: tuple[Any, ...]


class Calendar:
    """Calls in the order of their times (seconds); those with equal times in the order of entry."""

    def __init__(self) -> None:
        self.now = 0.0
        self.happened = 0  # calls made so far
        self._made = 0  # entries so far
        self._entries: list[_Entry] = []

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """Enters a call of `call(*arguments)` at `time`; raises ValueError if that is before now, or NaN."""
        if not time >= self.now:
            raise ValueError(f"{time} is not a time from {self.now} on")
        heapq.heappush(self._entries, _Entry(time, self._made, call, arguments))
        self._made += 1

    def after(self, delay: float, call: Callable[..., None], *arguments: Any) -> None:
        """Enters a call `delay` seconds from now."""
        self.at(self.now + delay, call, *arguments)

    def advance(self) -> bool:
        """Moves the clock to the next entry and makes its call; returns False if there is none."""
        if not self._entries:
            return False
        entry = heapq.heappop(self._entries)
        self.now = entry.time
        self.happened += 1
        entry.call(*entry.arguments)
        return True


class Timer:
    """A call that is to be made at the earliest of the times asked for, as for a core's next deadline."""

    def __init__(self, calendar: Calendar, call: Callable[[], None]) -> None:
        self._calendar, self._call = calendar, call
        self._at: float | None = None
        self._cleared = 0  # times so far

    def set(self, deadline: float | None) -> None:
        """Adds this time, or now if it is past; None adds nothing."""
        if deadline is not None and (self._at is None or deadline < self._at):
            self._at = max(deadline, self._calendar.now)
            self._calendar.at(self._at, self._ring, self._at, self._cleared)

    def clear(self) -> None:
        """Forgets all times."""
        self._at, self._cleared = None, self._cleared + 1

    def _ring(self, at: float, cleared: int) -> None:
        if (at, cleared) == (self._at, self._cleared):  # else an earlier time has replaced it
            self._at = None
            self._call()
