"""Where each learner's batches go on; the syncer keeps this for the learner's next process."""

from __future__ import annotations

import json
import pathlib
import threading
import time
from typing import Any

from ddiloco.data import shards
from ddiloco.data.errors import DataError
from ddiloco.disk import checked_json
from ddiloco.observe.owner import Owner
from ddiloco.remote.wire.agreement import WireError
from ddiloco.settings.experiment import Experiment

LONGEST = 768 << 10  # characters of one position: messages hold no more
MOST_SHARDS = 1 << 20  # that an earlier run is believed to have had
WRITE_EVERY = 1.0  # seconds after a write; a lost machine only makes learners draw these last batches twice


class Positions:
    """A file of positions by learner; for several threads. Without a folder they are only in memory.

    Only `flush` waits for the disk: what `put` stores is written by a thread that ends with the write.
    """

    def __init__(self, folder: pathlib.Path | None) -> None:
        self._path = folder / "positions.json" if folder is not None else None
        self._owner = None if folder is None else Owner(folder.parent)
        self._lock = threading.Lock()
        self._by_learner: dict[str, str] = {}
        self._unwritten = False  # whether the file lacks something
        self._written = 0.0  # when the last write ended, monotonic seconds
        self._writer = threading.Thread()  # the last one
        self._disk = threading.Lock()  # of who writes; nobody waits for it with the other lock

    def load(self, experiment: Experiment) -> str | None:
        """Reads what an earlier syncer left, and deals the data again where it had other learners.

        Returns why it cannot be, in a line, if there is something.
        """
        try:
            found = checked_json.load(self._path) if self._path is not None else {}
            if all(isinstance(text, str) for text in found.values()):
                self._by_learner = _dealt(found, experiment)
                self._unwritten = self._by_learner != found
        except FileNotFoundError:
            return None
        except (OSError, ValueError, DataError) as error:
            return f"{self._path}: {error}: learners that come again begin their data again"
        self.flush()
        return None

    def get(self, learner: int) -> str:
        """JSON; empty if there is none."""
        with self._lock:
            return self._by_learner.get(str(learner), "")

    def beside(self, learner: int) -> str:
        """Where a second reader of the learner's shards begins, JSON; empty where it has no position."""
        position = self.get(learner)
        try:
            return position and json.dumps(shards.beside(json.loads(position)))
        except (DataError, ValueError, RecursionError):  # a learner may say what it likes
            return ""

    def put(self, learner: int, position: str) -> None:
        """Keeps the learner's newest position.

        Raises:
          WireError: it is not a position.
        """
        if len(position) > LONGEST:
            raise WireError("malformed position", f"of {len(position)} characters")
        with self._lock:
            self._by_learner[str(learner)] = position
            self._unwritten = True
            due = self._path is not None and time.monotonic() - self._written >= WRITE_EVERY
            if due and not self._writer.is_alive():
                self._writer = threading.Thread(target=self.flush, name="positions", daemon=True)
                self._writer.start()

    def flush(self) -> None:
        """Writes what is not in the file yet; returns once that is done."""
        if self._path is None or self._owner is None:
            return
        with self._disk:
            with self._lock:
                if not self._unwritten:
                    return
                newest, self._unwritten = dict(self._by_learner), False
            try:
                self._owner.check()
                checked_json.save(self._path, newest)
            except OSError:  # the next write tries again; the durable state's alarm reports it
                with self._lock:
                    self._unwritten = True
            finally:
                with self._lock:
                    self._written = time.monotonic()


def _dealt(found: dict[str, str], experiment: Experiment) -> dict[str, str]:
    """The positions of this run's learners: those that were found, if any is of as many shards.

    Raises:
      DataError: there were others, and what one of them said is no position.
    """
    states = [state for text in found.values() if (state := _state(text)) is not None]
    if not states or any(state["stream"]["num_shards"] == experiment.num_data_shards for state in states):
        return found
    groups = [experiment.data_shards((m,)) for m in range(experiment.most_learners)]
    dealt = enumerate(shards.reshard(states, experiment.num_data_shards, groups))
    return {str(m): json.dumps(position) for m, position in dealt if position is not None}


def _state(text: str) -> dict[str, Any] | None:
    """What a learner said, if it names a stream's shards."""
    try:
        state = json.loads(text)
        return dict(state) if 0 < state["stream"]["num_shards"] <= MOST_SHARDS else None
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
