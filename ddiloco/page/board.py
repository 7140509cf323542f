"""Some runs as they are to be seen: read a little at a time, and drawn when somebody looks."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Sequence

from ddiloco.page.history import History
from ddiloco.page.sheet import content
from ddiloco.page.view import RunView, view_of

EVERY = 2.0  # seconds between two looks, at least
SHARE = 0.01  # of a core that a run gives to looking; ten times that while much is still to be read
READ = 0.1  # seconds at a time for what is new in the files
UNSEEN = 10.0  # seconds between two readings while nobody watches


class Board:
    """Owned by one thread."""

    def __init__(self, workdirs: Sequence[pathlib.Path], share: float = SHARE) -> None:
        """`share`: of a core that looking may take."""
        self._histories = [History(workdir) for workdir in workdirs]
        self._share = share
        self._read_at = 0.0
        self.content = ""
        self._cost = 0.0  # seconds that the last look took

    def read(self) -> bool:
        """Takes in what is new in the files, for a moment; returns whether that was all."""
        whole = [history.read(READ) for history in self._histories]
        return all(whole)

    def read_unseen(self) -> float:
        """Reads if it is time to, lest a visitor wait for days of a run; returns seconds until it is."""
        if time.monotonic() >= self._read_at:
            begun = time.thread_time()
            whole = self.read()
            pause = self._pause(time.thread_time() - begun, UNSEEN if whole else 0.0)
            self._read_at = time.monotonic() + pause
        return max(0.0, self._read_at - time.monotonic())

    def views(self) -> list[RunView]:
        """The runs as they are now."""
        self.read()
        return [view_of(history) for history in self._histories]

    def look(self) -> bool:
        """Draws what is to be seen; returns whether it differs from before."""
        begun = time.thread_time()
        before, self.content = self.content, content(self.views(), live=True)
        self._cost = time.thread_time() - begun
        return self.content != before

    @property
    def pause(self) -> float:
        """Seconds until the next look, so that looking takes no more than its share of a core."""
        whole = all(history.whole for history in self._histories)
        return self._pause(self._cost, EVERY if whole else 0.0)

    def _pause(self, spent: float, least: float) -> float:
        """Seconds until as much may be spent again; at least so many, or none while much is to be read."""
        share = self._share if least else min(0.9, 10 * self._share)
        return max(least, spent / share - spent)
