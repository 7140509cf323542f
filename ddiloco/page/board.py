"""Some runs as they are to be seen: read a little at a time, and drawn when somebody looks."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Sequence

from ddiloco.page.history import History
from ddiloco.page.sheet import content
from ddiloco.page.view import RunView, view_of

EVERY = 2.0  # seconds between two looks, at least
SHARE = 0.01  # of a core that looking may take
READ = 0.05  # seconds at a time for what is new in the files
UNSEEN = 10.0  # seconds between two readings while nobody watches


class Board:
    """Owned by one thread."""

    def __init__(self, workdirs: Sequence[pathlib.Path]) -> None:
        self._histories = [History(workdir) for workdir in workdirs]
        self._read_at = 0.0
        self.content = ""
        self.cost = 0.0  # seconds that the last look took

    def read(self) -> bool:
        """Takes in what is new in the files, for a moment; returns whether that was all."""
        whole = [history.read(READ) for history in self._histories]
        return all(whole)

    def read_unseen(self) -> None:
        """Reads if it is time to, so that whoever comes need not wait for days of a run to be read."""
        if time.monotonic() < self._read_at:
            return
        begun = time.thread_time()
        whole = self.read()
        spent = time.thread_time() - begun
        self._read_at = time.monotonic() + (max(UNSEEN, spent / SHARE) if whole else 9 * spent)

    def views(self) -> list[RunView]:
        """The runs as they are now."""
        self.read()
        return [view_of(history) for history in self._histories]

    def look(self) -> bool:
        """Draws what is to be seen; returns whether it differs from before."""
        begun = time.thread_time()
        before, self.content = self.content, content(self.views(), live=True)
        self.cost = time.thread_time() - begun
        return self.content != before

    @property
    def pause(self) -> float:
        """Seconds until the next look, so that looking takes no more than its share of a core."""
        return max(EVERY, self.cost / SHARE)
