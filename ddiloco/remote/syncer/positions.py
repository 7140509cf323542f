"""Where each learner's batches go on, as the syncer keeps it for the learner's next process."""

from __future__ import annotations

import contextlib
import json
import pathlib
import threading
import time

from ddiloco.observe.files import replacing
from ddiloco.remote.wire.agreement import WireError

LONGEST = 64 << 10  # characters of one position
WRITE_EVERY = 1.0  # seconds; what is lost with the machine is batches drawn twice, and nothing committed


class Positions:
    """A file of positions by learner; for several threads. Without a folder they are in memory alone."""

    def __init__(self, folder: pathlib.Path | None) -> None:
        self._path = folder / "positions.json" if folder is not None else None
        self._lock = threading.Lock()
        self._written = 0.0
        self._by_learner: dict[str, str] = {}

    def load(self) -> None:
        """Takes what an earlier syncer left; a file that cannot be read counts as none."""
        try:
            found = json.loads(self._path.read_text()) if self._path is not None else {}
        except (OSError, ValueError, RecursionError):
            return
        if isinstance(found, dict) and all(isinstance(text, str) for text in found.values()):
            self._by_learner = found

    def get(self, learner: int) -> str:
        """JSON; empty if there is none."""
        with self._lock:
            return self._by_learner.get(str(learner), "")

    def put(self, learner: int, position: str) -> None:
        """Keeps the learner's newest.

        Raises:
          WireError: it is no position.
        """
        if len(position) > LONGEST:
            raise WireError("malformed position", f"of {len(position)} characters")
        with self._lock:
            self._by_learner[str(learner)] = position
            if time.monotonic() - self._written >= WRITE_EVERY:
                self._write()

    def flush(self) -> None:
        """Writes what is not in the file yet."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        if self._path is None:
            return
        # Where the disk refuses it is tried again with the next; the durable state's alarm tells of that.
        with contextlib.suppress(OSError), replacing(self._path) as new:
            new.write_text(json.dumps(self._by_learner))
