"""Takes snapshots of a run: learners write checkpoints under a number, then the syncer pins what it has.

It pins of each fragment a version as new as that in any of these checkpoints, and the watermarks in it say
whose work it has. So nothing is marked, and nobody waits for another.
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
from ddiloco.workers.learner_arrays import STEPS_IN_FLIGHT


@dataclasses.dataclass(frozen=True)
class SnapshotAsked:
    """An operator wants a snapshot now."""


@dataclasses.dataclass(frozen=True)
class Completed:
    """The end of a snapshot: what it is, or why it is none."""

    number: int
    snapshot: Snapshot | None
    problem: str = ""


@dataclasses.dataclass
class _Taking:
    """The snapshot under way."""

    number: int
    step: int
    begun: float  # monotonic seconds
    deadline: float
    awaited: dict[int, int]  # by learner that is asked for a checkpoint, its incarnation
    written: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """By learner whose checkpoint is there, the versions in it."""
    absent: dict[int, str] = dataclasses.field(default_factory=dict)  # by learner, why there is none
    alarmed: bool = False  # that the disk hangs

    @property
    def pinning(self) -> bool:
        return not self.awaited


class SnapshotTaker:
    """Used by the syncer's thread; what waits for a disk is on another. One snapshot at a time."""

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
        """`pin` puts versions as new as these, by fragment, into a folder, and gives the newest step.

        `step`: the global one now. `send`: into the syncer's inbox. `seconds`: that learners have to write;
        None: as the settings say.
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
        """Whether a snapshot is due at this step, and none is under way."""
        return bool(self._every) and step >= self._next_step and self._taking is None

    def begin(self, core: SyncerCore, now: float) -> tuple[int, Sequence[tuple[int, int]]]:
        """Begins one: its number, and the learners to ask for checkpoints, with their incarnations.

        Of one that cannot begin, or while another is under way, there are none.
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
        steps = STEPS_IN_FLIGHT + 1
        deadline = now + self._seconds() + steps * core.longest_step(asked)
        self._taking = _Taking(number, core.step, now, deadline, dict(asked))
        if not asked:
            self._finish()
        return number, [*asked.items()]

    def heard(self, event: object) -> None:
        """Takes an event of the core: it may end a learner's process, or begin another."""
        match event:
            case events.LearnerLost(learner, incarnation, reason):
                if self._taking is not None and self._taking.awaited.get(learner) == incarnation:
                    self._answered(learner, reason)
            case events.LearnerJoined(learner, incarnation):
                if self._taking is not None and self._taking.awaited.get(learner, incarnation) < incarnation:
                    self._answered(learner, "it joined again")

    def silent(self, learner: int) -> None:
        """The learner has been silent for long."""
        self._answered(learner, "it is silent")

    def take(self, message: CheckpointWritten | Completed) -> None:
        """Takes a message about the snapshot under way; ignores those about others."""
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
        """Goes on without learners that take too long; where a disk hangs, only says so."""
        taking, deadline = self._taking, self.next_deadline()
        if taking is None or deadline is None or now < deadline:
            return
        if taking.pinning:
            taking.alarmed = True
            self._alarm(f"snapshot {taking.number} is not completed, and none is taken meanwhile")
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
        """Whether one is."""
        return self._taking is not None

    def seconds_left(self) -> float:
        """How long the snapshot under way may still take, from any thread; 0: there is none."""
        taking = self._taking
        return 0.0 if taking is None else max(0.0, taking.deadline - time.monotonic())

    def close(self) -> None:
        """Gives up the snapshot under way, since the run is over."""
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
        if taking.absent and not taking.written:  # who resumed from it would lose what all learners held
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
        """Pins what the syncer has; on its own thread, since disks may hang.

        Flushes the run's records first: what led to the snapshot must be on disk if the snapshot is.
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
        self._record(records.Alarm(f"{self.folder}: {problem}; training goes on", time.time()))


def _after(step: int, every: int) -> int:
    return (step // every + 1) * every if every else 0
