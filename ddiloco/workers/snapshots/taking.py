"""The syncer's part in snapshots: begins them, hears when all have recorded, and makes them complete."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import pathlib
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ddiloco.outer.global_model import FragmentState
from ddiloco.protocol import events
from ddiloco.protocol.clocks import VectorClock, is_consistent_cut
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.settings.saving import SnapshotConfig
from ddiloco.storage.array_names import named
from ddiloco.storage.snapshots.parts import SYNCER_PART, check_listing, parts_folder
from ddiloco.storage.snapshots.store import (
    Clocks,
    PartFiles,
    PartWriter,
    SnapshotError,
    SnapshotPart,
    SnapshotStore,
)
from ddiloco.storage.tape.header import SnapshotName
from ddiloco.telemetry import records
from ddiloco.workers.snapshots.messages import (
    SYNCER,
    Completed,
    CutBegun,
    FragmentsWritten,
    PartWritten,
    SnapshotMessage,
    StateRecorded,
    part_name,
    sender_of,
)


@dataclasses.dataclass
class _Taking:
    """The snapshot that is under way."""

    number: int
    begun: float  # monotonic seconds
    deadline: float  # likewise
    time: float  # unix seconds
    state: SyncerState
    clock: VectorClock
    arrays: dict[str, np.ndarray]
    asked: dict[int, int]  # incarnation by learner
    skipped: set[int]  # learners that were not asked
    awaited: set[int]  # learners that have neither recorded their state nor gone
    clocks: dict[int, VectorClock] = dataclasses.field(default_factory=dict)
    parts: dict[int, PartFiles] = dataclasses.field(default_factory=dict)
    writing: bool = False  # the syncer's own part; nothing more is recorded
    completing: bool = False
    told: bool = False  # that the disk does not complete it


class SnapshotTaker:
    """Owned by the syncer's thread; other threads write and complete, and send it messages.

    The syncer records its state as it begins a snapshot, then tells the learners. Each answers once it has
    recorded its own; one that goes before is left out. Once all have, the syncer's part is written, and once
    all parts are, the snapshot is complete.

    No learner and no merge waits for a snapshot. One that cannot be finished is given up and counted, with an
    alarm if a disk or a device refused or time ran out.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        config: SnapshotConfig,
        header: Mapping[str, Any],
        step: int,
        send: Callable[[SnapshotMessage | Completed], None],
        record: Callable[[Any], None],
        keep_also: SnapshotName | None = None,
        parts: int = 0,
        patience: Callable[[int], float] | None = None,
        steps_in_flight: int = 0,
    ) -> None:
        """`folder`: of the run's snapshots. `header`: what is the same in all of them. `step`: the syncer's.

        `send` puts a message into the syncer's inbox, from any thread. `keep_also` stays besides the newest.
        `parts`: processes that write the fragments; 0: the syncer's thread has them. `patience`: seconds that
        a snapshot of so many learners may take, beside the step at whose end they see the mark and those
        before it, `steps_in_flight`; None: as `config` says.
        """
        self._own_parts = {SYNCER, *(SYNCER - 1 - part for part in range(parts))}  # beside learners
        self.folder = folder
        self.writer = PartWriter(parts_folder(folder))
        self._store = SnapshotStore(folder, config.keep, keep_also)
        self._every = config.every
        self._patience = patience or (lambda learners: config.timeout)
        self._steps = steps_in_flight + 1
        self._header = dict(header)
        self._next_step = _after(step, config.every)
        self._send, self._record = send, record
        self._gathering = False
        self._taking: _Taking | None = None
        self._spoilt: set[int] = set()  # learners for which the last one failed; the next does without
        self._finisher = concurrent.futures.ThreadPoolExecutor(1, "snapshot-complete")
        self._writing: concurrent.futures.Future[PartFiles] | None = None  # the newest of the syncer's part

    def take_one_soon(self) -> bool:
        """Has a snapshot taken now instead of when it would be due, from any thread; returns True."""
        self._next_step = 0
        return True

    def wanted(self, step: int) -> bool:
        """Whether a snapshot is due at this step; the syncer then gathers its state and calls `begin`.

        None is while the part of one that was given up is still being written: each holds all fragments.
        """
        if not self._every or step < self._next_step or self._gathering or self._taking is not None:
            return False
        if self._writing is not None and not self._writing.done():
            return False
        self._next_step = _after(step, self._every)
        self._gathering = True
        return True

    def begin(self, core: SyncerCore, fragments: Sequence[FragmentState], now: float) -> CutBegun | None:
        """Records the syncer's state; gives what to tell learners and parts before anything else.

        Args:
          core: the syncer's.
          fragments: those gathered after `wanted`; where parts have them, none.
          now: monotonic seconds.
        """
        self._gathering = False
        state = core.state()
        alone = len(self._own_parts) == 1
        if alone and tuple(fragment.version for fragment in fragments) != state.versions:
            return None  # they could not be gathered, or a merge was left out because the run ends
        newest = dict(state.incarnations)
        skipped = self._spoilt & set(core.live)
        if 2 * len(skipped) > len(core.live):
            skipped = set()
        asked = {learner: newest[learner] for learner in core.live if learner not in skipped}
        # Learners that live know the numbers so far, though the folder may have been emptied since.
        number = self._store.next_number(state.step // self._every)
        try:  # so that a restarted syncer takes another number
            (self.folder / f"{number:06d}").mkdir(parents=True)
        except OSError as error:
            self._given_up(number, state.step, f"{self.folder}: {records.reason(error)}", alarm=True)
            return None
        arrays: dict[str, np.ndarray] = {}
        for p, fragment in enumerate(fragments):
            arrays |= named(f"fragment/{p}", fragment.pieces) | named(f"outer/{p}", fragment.optimizer)
        deadline = now + self._patience(len(asked)) + self._steps * core.longest_step(asked)
        times, clock = (now, deadline, time.time()), core.vector_clock
        self._taking = _Taking(number, *times, state, clock, arrays, asked, skipped, {*asked})
        self._write_when_recorded()
        return CutBegun(number, tuple(sorted(asked)))

    def take_fragments(self, message: FragmentsWritten) -> None:
        """Takes what a part of the syncer has written; ignores it if it is of another snapshot."""
        taking = self._taking
        if taking is None or message.number != taking.number:
            return
        if message.files is None:
            self._give_up(message.problem, {SYNCER}, alarm=True)
            return
        taking.parts[SYNCER - 1 - message.part] = message.files
        for made in message.versions:
            taking.state = taking.state.with_version(made.round, made.version, made.lineage)
            taking.clock = taking.clock.merged(made.round.fragment, made.version)
        self._write_when_recorded()

    def part_lost(self, part: int) -> None:
        """A part of the syncer was started again, or has lost its connection: it may not know of the cut."""
        if self._taking is not None and not self._taking.completing:
            self._give_up(f"part {part} of the syncer was away")

    def heard(self, event: object) -> None:
        """Takes an event before the syncer handles it: it may end a learner's process, or begin another."""
        taking = self._taking
        if taking is None or taking.writing:
            return
        learner, incarnation = sender_of(event)
        if learner is None or taking.asked.get(learner) is None:
            return
        lost = isinstance(event, events.LearnerLost)
        if incarnation < taking.asked[learner] or (incarnation == taking.asked[learner] and not lost):
            return
        if lost and event.reason == events.LEFT and learner not in taking.parts:
            # The run is probably being stopped, and the newest snapshot must have this learner.
            self._give_up(f"learner {learner} left before its part was written", {learner})
        else:
            self.lost(learner)

    def lost(self, learner: int) -> None:
        """The learner was lost: the snapshot leaves it out unless its part is written.

        Where it was the last one, the snapshot is given up: whoever resumed from it would lose what all held.
        """
        taking = self._taking
        if taking is None or taking.completing:
            return
        if learner not in taking.parts:
            taking.clocks.pop(learner, None)
        taking.awaited.discard(learner)
        if taking.asked and not taking.awaited and not taking.clocks:
            self._give_up("all learners were lost")
        else:
            self._go_on()

    def silent(self, learner: int) -> None:
        """The learner has been silent for long: the snapshot leaves it out unless its mark has come."""
        if self._taking is not None and learner not in self._taking.clocks:
            self.lost(learner)

    def take(self, message: SnapshotMessage | Completed) -> None:
        """Takes a message about the snapshot under way; ignores those about others."""
        taking = self._taking
        if taking is None or message.number != taking.number:
            return
        match message:
            case StateRecorded(learner, incarnation, _, step, versions):
                if learner not in taking.awaited or taking.asked[learner] != incarnation:
                    return
                taking.awaited.remove(learner)
                if step is None:  # it writes no parts: a snapshot may well have no learner
                    self._go_on()
                    return
                made = {p: version for p, version in enumerate(versions) if version}
                taking.clocks[learner] = clock = VectorClock({learner: (incarnation, step)}, made)
                if is_consistent_cut(taking.clock, {learner: clock}):
                    self._write_when_recorded()
                else:
                    self._give_up("what it recorded is no consistent cut", {learner}, alarm=True)
            case PartWritten(learner=learner):
                if message.files is None and (learner == SYNCER or learner in taking.clocks):
                    self._give_up(message.problem, {learner}, alarm=True)
                elif message.files is not None:
                    taking.parts[learner] = message.files
                    self._complete_when_written()
            case Completed(problem=problem, learner=learner):
                if problem:
                    self._give_up(problem, {learner}, alarm=True)
                else:
                    self._completed()

    def timeout(self, now: float) -> None:
        """Gives up the snapshot under way if it has taken too long; where a disk hangs, only tells."""
        taking, deadline = self._taking, self.next_deadline()
        if taking is None or deadline is None or now < deadline:
            return
        if taking.completing:
            taking.told = True
            told = f"{self.folder}: snapshot {taking.number} is not completed, and none is taken meanwhile"
            self._record(records.Alarm(told, time.time()))
        else:
            missing = sorted({*taking.awaited, *taking.clocks} - {*taking.parts})
            late = "not all parts" if missing else "not the syncer's part"
            problem = f"after {deadline - taking.begun:g} s: {late} came within snapshot.timeout"
            self._give_up(problem, missing, alarm=True)

    def next_deadline(self) -> float | None:
        """When to call `timeout`, monotonic seconds."""
        return None if self._taking is None or self._taking.told else self._taking.deadline

    def seconds_left(self) -> float:
        """How long the snapshot under way may still take, from any thread; 0: there is none."""
        taking = self._taking
        return 0.0 if taking is None else max(0.0, taking.deadline - time.monotonic())

    @property
    def epoch(self) -> int:
        """The newest snapshot that was ever begun in the folder; 0: none."""
        return self._store.last_number()

    @property
    def nearly_complete(self) -> bool:
        """Whether one is under way that only has to be written."""
        return self._taking is not None and self._taking.writing

    def close(self, timeout: float) -> None:
        """Gives up the snapshot under way, since the run is over."""
        if self._taking is not None:
            self._give_up("the run is over")
        self._finisher.shutdown(wait=False, cancel_futures=True)
        self.writer.close(timeout)

    def _go_on(self) -> None:
        self._write_when_recorded()
        self._complete_when_written()

    def _write_when_recorded(self) -> None:
        taking = self._taking
        if taking is None or taking.writing or taking.awaited:
            return
        if not self._own_parts - {SYNCER} <= set(taking.parts):
            return
        taking.writing = True
        part = SnapshotPart(taking.arrays, dataclasses.asdict(taking.state))
        taking.arrays = {}  # the writer lets go of them, long before large learners have written theirs
        self._writing = future = self.writer.write(taking.number, SYNCER_PART, part)
        future.add_done_callback(lambda done: self._send(PartWritten.of(SYNCER, taking.number, done)))

    def _complete_when_written(self) -> None:
        taking = self._taking
        written = {*self._own_parts, *taking.clocks} <= set(taking.parts)
        if not (taking.writing and written) or taking.completing:
            return
        taking.completing = True
        learners = sorted(taking.clocks)
        header = {
            **self._header,
            "step": taking.state.step,
            "versions": list(taking.state.versions),
            "watermarks": [
                {m: [mark.life, mark.steps] for m, mark in known.items()} for known in taking.state.watermarks
            ],
            "time": taking.time,
            "learners": learners,
            "clocks": dataclasses.asdict(Clocks(taking.clock, taking.clocks)),
        }
        parts = {m: taking.parts[m] for m in (*learners, *sorted(self._own_parts))}
        self._finisher.submit(self._complete, taking.number, header, parts)

    def _complete(self, number: int, header: dict[str, Any], parts: Mapping[int, PartFiles]) -> None:
        """Makes a snapshot complete, on its own thread since disks may hang.

        Flushes the run's records first: what led to the snapshot must be on disk if the snapshot is.
        """
        records.write_out(self._record)
        learner, problem = SYNCER, ""
        staged, folder = parts_folder(self.folder) / f"{number:06d}", self.folder / f"{number:06d}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for learner, files in parts.items():  # the syncer comes last
                check_listing(staged / part_name(learner), files)
                (staged / part_name(learner)).rename(folder / part_name(learner))
            self._store.complete(number, header, {part_name(m): files for m, files in parts.items()})
        except (OSError, SnapshotError) as error:
            problem = str(error)
            for name in map(part_name, parts):  # a full disk needs the room; the folder keeps the number
                shutil.rmtree(folder / name, ignore_errors=True)
        self._clear(number)
        self._send(Completed(number, problem, learner))

    def _clear(self, number: int) -> None:
        """Removes parts of this snapshot and earlier ones that are still in the staging folder."""
        with contextlib.suppress(OSError):
            for left in parts_folder(self.folder).iterdir():
                if not left.name.isdigit() or int(left.name) <= number:
                    shutil.rmtree(left, ignore_errors=True)

    def _completed(self) -> None:
        taking, self._taking = self._taking, None
        self._spoilt = set()
        files = [file for m in (*taking.clocks, *self._own_parts) for file in taking.parts[m].files.values()]
        values = {
            "number": taking.number,
            "step": taking.state.step,
            "learners": sorted(taking.clocks),
            "absent": sorted({*taking.asked, *taking.skipped} - set(taking.clocks)),
            "bytes": sum(size for size, _ in files),
            "seconds": time.monotonic() - taking.begun,
        }
        self._record(records.Noted("snapshot", values, time.time()))

    def _give_up(self, problem: str, by: Collection[int] = (), alarm: bool = False) -> None:
        """Gives up the snapshot under way; `by`: the learners that it fails for, if it is not the syncer."""
        taking, self._taking = self._taking, None
        self._spoilt = {m for m in by if m > SYNCER}
        if alarm and self._spoilt:
            problem = f"{problem} (learner {', '.join(map(str, sorted(self._spoilt)))})"
        self._given_up(taking.number, taking.state.step, problem, alarm)
        with contextlib.suppress(RuntimeError):  # the run is over
            self._finisher.submit(self._clear, taking.number)

    def _given_up(self, number: int, step: int, problem: str, alarm: bool) -> None:
        values = {"number": number, "step": step, "reason": problem}
        self._record(records.Noted("snapshot_given_up", values, time.time()))
        if alarm:
            short = problem.rsplit(": ", 1)[-1]
            alarm_text = f"{self.folder}: {short}: a snapshot is given up; training goes on"
            self._record(records.Alarm(alarm_text, time.time()))


def _after(step: int, every: int) -> int:
    return (step // every + 1) * every if every else 0
