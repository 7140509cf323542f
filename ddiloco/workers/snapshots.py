"""Snapshots of a run: learners write checkpoints under a number, then the syncer pins its versions.

Of each fragment it pins a version at least as new as in any of these checkpoints; its watermarks say whose
work it contains. So there are no markers, and no process waits for another.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from ddiloco.protocol import events
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.settings.experiment import Experiment, to_json
from ddiloco.storage.snapshots import SYNCER, Snapshot, SnapshotHeader, SnapshotStore
from ddiloco.telemetry import records
from ddiloco.workers.exchange import CheckpointWritten


@dataclasses.dataclass(frozen=True)
class SnapshotAsked:
    """An operator wants a snapshot now."""


@dataclasses.dataclass(frozen=True)
class Completed:
    """The outcome of a snapshot: the snapshot, or the problem."""

    number: int
    snapshot: Snapshot | None
    problem: str = ""


@dataclasses.dataclass
class _Taking:
    """The snapshot in progress."""

    number: int
    step: int
    begun: float  # monotonic seconds
    deadline: float
    awaited: dict[int, int]  # incarnations of learners whose checkpoint is awaited
    written: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """By learner with a written checkpoint, its versions."""
    absent: dict[int, str] = dataclasses.field(
        default_factory=dict
    )  # by learner without a checkpoint, the reason
    alarmed: bool = False  # of a disk that hangs

    @property
    def pinning(self) -> bool:
        return not self.awaited


class SnapshotTaker:
    """Takes snapshots, one at a time, for the syncer's thread; disk accesses are on another thread."""

    def __init__(
        self,
        store: SnapshotStore,
        experiment: Experiment,
        run: str,
        pin: Callable[[pathlib.Path, Sequence[int]], int],
        step: int,
        send: Callable[[Completed], None],
        record: Callable[[Any], None],
        seconds: Callable[[], float] | None = None,
    ) -> None:
        """`pin` links versions at least as new as these, by fragment, into a folder; returns the newest step.

        `step`: the present global one. `send`: into the syncer's inbox. `seconds`: for learners to write;
        None: by the settings.
        """
        self.folder = store.folder
        self._store, self._pin, self._send, self._record = store, pin, send, record
        self._experiment, self._run = experiment, run
        self._every = experiment.snapshot.every
        self._seconds = seconds or (lambda: experiment.snapshot.timeout)
        self._next_step = _after(step, self._every)
        self._taking: _Taking | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "snapshot")

    def due(self, step: int) -> bool:
        """Whether a snapshot is due at this step, and none is in progress."""
        return bool(self._every) and step >= self._next_step and self._taking is None

    def begin(self, core: SyncerCore, now: float) -> tuple[int, Sequence[tuple[int, int]]]:
        """Starts a snapshot: its number, and the (learner, incarnation) pairs to ask for checkpoints.

        (0, ()) if it cannot start, or another is in progress.
        """
        if self._taking is not None:
            return 0, ()
        self._next_step = _after(core.step, self._every)
        newest = dict(core.state().incarnations)
        asked = {learner: newest[learner] for learner in core.live}
        try:  # so that a restarted syncer takes another number
            number = self._store.begin()
        except OSError as error:
            self._given_up(0, core.step, f"{self.folder}: {records.reason(error)}")
            return 0, ()
        steps = self._experiment.train.steps_in_flight + 1
        deadline = now + self._seconds() + steps * core.longest_step(asked)
        self._taking = _Taking(number, core.step, now, deadline, dict(asked))
        if not asked:
            self._finish()
        return number, [*asked.items()]

    def heard(self, event: object) -> None:
        """Applies an event of the core that may end or replace a learner's process."""
        match event:
            case events.LearnerLost(learner, incarnation, reason):
                if self._taking is not None and self._taking.awaited.get(learner) == incarnation:
                    self._answered(learner, reason)
            case events.LearnerJoined(learner, incarnation):
                if self._taking is not None and self._taking.awaited.get(learner, incarnation) < incarnation:
                    self._answered(learner, "it joined again")

    def silent(self, learner: int) -> None:
        """The learner is silent."""
        self._answered(learner, "it is silent")

    def take(self, message: CheckpointWritten | Completed) -> None:
        """Applies a message about the snapshot in progress; ignores others."""
        taking = self._taking
        if taking is None or message.number != taking.number:
            return
        match message:
            case CheckpointWritten(learner, _, versions, problem):
                self._answered(learner, problem, versions)
            case Completed(snapshot=None):
                self._give_up(message.problem)
            case Completed(snapshot=Snapshot() as snapshot):
                self._taking = None
                values = {
                    "number": taking.number,
                    "step": snapshot.header.step,
                    "learners": sorted(taking.written),
                    "absent": sorted(taking.absent),
                    "bytes": sum(snapshot.header.files.values()),
                    "seconds": time.monotonic() - taking.begun,
                }
                self._record(records.Noted("snapshot", values, time.time()))

    def timeout(self, now: float) -> None:
        """Continues without learners that take too long; if the disk hangs, raises an alarm."""
        taking, deadline = self._taking, self.next_deadline()
        if taking is None or deadline is None or now < deadline:
            return
        if taking.pinning:
            taking.alarmed = True
            self._alarm(f"snapshot {taking.number} is not complete, and none is taken meanwhile")
            return
        late = [*taking.awaited]
        which = ", ".join(map(str, late))
        self._alarm(f"learner {which} wrote no checkpoint within snapshot.timeout: a snapshot goes without")
        for learner in late:
            self._answered(learner, "it took longer than snapshot.timeout")

    def next_deadline(self) -> float | None:
        """When to call `timeout`, monotonic seconds."""
        return None if self._taking is None or self._taking.alarmed else self._taking.deadline

    @property
    def under_way(self) -> bool:
        """Whether a snapshot is in progress."""
        return self._taking is not None

    def seconds_left(self) -> float:
        """Remaining seconds of the snapshot in progress, from any thread; 0: none."""
        taking = self._taking
        return 0.0 if taking is None else max(0.0, taking.deadline - time.monotonic())

    def close(self) -> None:
        """Drops the snapshot in progress, since the run is over."""
        if self._taking is not None:
            self._give_up("the run is over", alarm=False)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _answered(self, learner: int, problem: str, versions: tuple[int, ...] = ()) -> None:
        taking = self._taking
        if taking is None or taking.awaited.pop(learner, None) is None:
            return
        if problem:
            taking.absent[learner] = problem
        else:
            taking.written[learner] = versions
        if taking.awaited:
            return
        if taking.absent and not taking.written:  # a resumed run would lose all learners' state
            which, why = next(iter(taking.absent.items()))
            self._give_up(f"no learner wrote a checkpoint: learner {which}: {why}")
        else:
            self._finish()

    def _finish(self) -> None:
        assert self._taking is not None
        written = self._taking.written
        versions = [max(held) for held in zip(*written.values(), strict=True)]
        self._thread.submit(self._complete, self._taking.number, tuple(sorted(written)), versions)

    def _complete(self, number: int, learners: tuple[int, ...], versions: Sequence[int]) -> None:
        """Pins the syncer's versions; on its own thread, since disks may hang.

        Flushes the run's records first: those that led to the snapshot must be on disk if the snapshot is.
        """
        records.write_out(self._record)
        try:
            step, now = self._pin(self._store.at(number) / SYNCER, versions), time.time()
            header = SnapshotHeader(self._run, step, now, learners, to_json(self._experiment))
            self._send(Completed(number, self._store.complete(number, header)))
        except (OSError, ValueError) as error:
            self._store.discard(number)  # a full disk needs the room
            self._send(Completed(number, None, f"{self.folder}: {records.reason(error)}"))

    def _give_up(self, problem: str, alarm: bool = True) -> None:
        taking, self._taking = self._taking, None
        assert taking is not None
        self._given_up(taking.number, taking.step, problem, alarm)

    def _given_up(self, number: int, step: int, problem: str, alarm: bool = True) -> None:
        values = {"number": number, "step": step, "reason": problem}
        self._record(records.Noted("snapshot_given_up", values, time.time()))
        if alarm:
            self._alarm(f"{problem.removeprefix(f'{self.folder}: ')}: a snapshot is given up")

    def _alarm(self, problem: str) -> None:
        self._record(records.Alarm(f"{self.folder}: {problem}; training continues", time.time()))


def _after(step: int, every: int) -> int:
    return (step // every + 1) * every if every else 0
