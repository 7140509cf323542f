"""Files by which the shards of a syncer know each other: addresses, and the end of each."""

from __future__ import annotations

import contextlib
import pathlib
import threading
import time
from collections.abc import Callable, Sequence

from ddiloco.storage import shard_states
from ddiloco.storage.run_mark import RunMark, RunMarkError, begun
from ddiloco.storage.shard_states import ShardState

LOOK_SECONDS = 0.5  # between two looks


class Shards:
    """One shard's view of all; its own file has one writer, the thread that runs the shard.

    Attributes:
      count: S.
      ended: set once the run is over for all: every shard has finished, or the first one ends it.
    """

    def __init__(self, folder: pathlib.Path, mark: RunMark, shard: int, count: int, steps: int) -> None:
        """`folder`: the syncer's. `mark`: of what was loaded from it. `steps`: at which the run ends."""
        self.count = count
        self.ended = threading.Event()
        self.superseded = False  # whether the run was started again: this process cannot go on with it
        self._folder, self._mark, self._shard, self._steps = folder, mark, shard, steps
        shard_states.sweep(folder, shard)
        known = self._of(shard)
        self._own = ShardState(mark.start, count, "", known.finished if known is not None else 0)
        self._known: dict[int, ShardState] = {}
        self._first_over = self._over(0)  # of a process before: the next one goes on
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def finished(self) -> bool:
        """Whether every shard has finished."""
        found = [self._own, *(self._known.get(s) for s in range(self.count) if s != self._shard)]
        return all(state is not None and state.finished >= self._steps for state in found)

    @property
    def has_finished(self) -> bool:
        """Whether this one has, perhaps in an earlier process."""
        return self._own.finished >= self._steps

    @property
    def addresses(self) -> list[str]:
        """HOST:PORT of each shard; empty: not announced yet."""
        found = [self._own if s == self._shard else self._known.get(s) for s in range(self.count)]
        return ["" if state is None else state.address for state in found]

    def announce(self, address: str) -> None:
        """Writes this shard's address for learners; raises OSError."""
        self._write(self._own._replace(address=address))

    def finish(self) -> None:
        """Makes durable that this shard has finished; raises OSError."""
        self._write(self._own._replace(finished=self._steps))

    def end(self, versions: Sequence[int]) -> None:
        """Writes that this process ends with the run, with its fragments' versions; raises OSError."""
        self._write(self._own._replace(over=True, versions=tuple(versions)))

    def watch(self, look: Callable[[], object]) -> None:
        """Looks at the others from now on, and calls `look` each time."""

        def run() -> None:
            while not self._closing.wait(LOOK_SECONDS):
                self.look()
                look()

        self._thread = threading.Thread(target=run, name="shards", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Looks no more."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(2.0)

    def look(self) -> None:
        """Reads the other shards' files."""
        for shard in range(self.count):
            if shard != self._shard and (state := self._of(shard)) is not None:
                self._known[shard] = state
        if self.count > 1:
            with contextlib.suppress(RunMarkError):
                found = begun(self._folder)
                self.superseded |= found is not None and found != self._mark
        if not self._over(0):
            self._first_over = False
        if self.finished or (self._shard and self._over(0) and not self._first_over) or self.superseded:
            self.ended.set()

    def wait_for_others(self, seconds: float) -> dict[int, ShardState]:
        """The shards that have ended, once all others have or after so many seconds."""
        until = time.monotonic() + seconds
        while True:
            self.look()
            ended = {s: state for s, state in self._known.items() if state.over}
            if len(ended) == self.count - 1 or time.monotonic() >= until:
                return ended
            self._closing.wait(LOOK_SECONDS / 2)

    def _over(self, shard: int) -> bool:
        state = self._of(shard)
        return state is not None and state.over

    def _of(self, shard: int) -> ShardState | None:
        """The state of a shard of this start and of as many."""
        state = shard_states.load(self._folder, shard)
        return state if state is not None and (state.start, state.shards) == self._key else None

    @property
    def _key(self) -> tuple[str, int]:
        return self._mark.start, self.count

    def _write(self, state: ShardState) -> None:
        state.save(self._folder, self._shard)
        self._own = state
