"""Virtual time: what is to happen when, and a clock that jumps from one entry to the next."""

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
        """Enters a call of `call(*arguments)` at `time`.

        Raises:
          ValueError: `time` is before now, or NaN.
        """
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
