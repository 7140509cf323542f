"""Virtual time: what is to happen when, and a clock that jumps from one happening to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol


class Entry(NamedTuple):
    """A call at its time, in seconds; `order` counts the entries ever made, and decides among equal times."""

    time: float
    order: int
    call: Callable[..., None]
    arguments: tuple[Any, ...]


class Watcher(Protocol):
    """Is told of every entry of a calendar; may enter nothing itself."""

    def entered(self, entry: Entry) -> None:
        """An entry was made."""

    def comes(self, entry: Entry) -> None:
        """The entry is the next to happen."""

    def happened(self, entry: Entry) -> None:
        """The entry's call was made."""


class Calendar:
    """Calls in the order of their times, in seconds; those of one time in the order of their entry."""

    def __init__(self) -> None:
        self.now = 0.0
        self.happened = 0  # calls made so far
        self.entered = 0  # entries made so far
        self.watcher: Watcher | None = None
        self._entries: list[Entry] = []

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """Enters a call; a time that has passed, or is not a number, is a mistake of the caller.

        Raises:
          ValueError: `time` is before now.
        """
        if not time >= self.now:
            raise ValueError(f"{time} is not a time from {self.now} on")
        entry = Entry(time, self.entered, call, arguments)
        self.entered += 1
        heapq.heappush(self._entries, entry)
        if self.watcher is not None:
            self.watcher.entered(entry)

    def after(self, delay: float, call: Callable[..., None], *arguments: Any) -> None:
        """Enters a call `delay` seconds from now."""
        self.at(self.now + delay, call, *arguments)

    def advance(self) -> bool:
        """Moves the clock to the next entry and makes its call; False where there is none."""
        if not self._entries:
            return False
        if self.watcher is not None:
            self.watcher.comes(self._entries[0])
        entry = heapq.heappop(self._entries)
        self.now = entry.time
        self.happened += 1
        entry.call(*entry.arguments)
        if self.watcher is not None:
            self.watcher.happened(entry)
        return True

    def skip(self, count: int) -> None:
        """Counts entries that were made before, in another calendar, and are here already."""
        self.entered += count

    def entries(self) -> list[Entry]:
        """All that is to happen, in its order."""
        return sorted(self._entries)

    def put_back(self, now: float, happened: int, entered: int, entries: Iterable[Entry]) -> None:
        """Stands where another calendar stood, with its entries in the place of all that were here."""
        self.now, self.happened, self.entered = now, happened, entered
        self._entries = list(entries)
        heapq.heapify(self._entries)
