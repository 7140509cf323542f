"""A learner's own part of a snapshot: copied on its devices between two steps, written by another thread."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

from ddiloco.disk.snapshots.parts import Part, PartFiles, PartWriter, learner_part
from ddiloco.protocol.clocks import VectorClock
from ddiloco.protocol.learner import FragmentWork, LearnerCore
from ddiloco.protocol.snapshot import Epoch
from ddiloco.roles.snapshots.messages import PartWritten, SnapshotMessage, StateRecorded


def fragments_to_json(fragments: Sequence[FragmentWork]) -> list[list[Any]]:
    """By fragment: version, the step it was merged at, steps and tokens since, and whether it was offered."""
    return [[f.version, f.merged_step, f.steps, f.tokens, f.offered] for f in fragments]


def fragments_from_json(told: Sequence[Sequence[Any]]) -> list[FragmentWork]:
    """What `fragments_to_json` gave."""
    return [FragmentWork(*row) for row in told]


class LearnerRecording:
    """Takes part in snapshots for one learner; all but the writing on the learner's own thread."""

    def __init__(
        self, learner: int, writer: PartWriter | None, tell: Callable[[SnapshotMessage], None]
    ) -> None:
        """`tell` gets a message to the syncer, from this thread or the writer's, without waiting.

        `writer` is None for a learner that has nowhere to write, which is absent from all snapshots.
        """
        self._learner, self._writer, self._tell = learner, writer, tell
        self._epoch = Epoch()
        self._writing: concurrent.futures.Future[PartFiles] | None = None

    def sees(self, number: int) -> bool:
        """Whether to record the state now, before what carries this epoch is handled."""
        return self._epoch.sees(number)

    def record(
        self,
        core: LearnerCore,
        arrays: Callable[[], tuple[dict[str, Any], dict[str, Any]]],
        state: dict[str, Any],
    ) -> None:
        """Records the learner's state as of now, and has it written.

        Args:
          core: the learner's.
          arrays: copies its arrays on the devices; gives them, and JSON values that belong to them.
          state: what else the part tells, JSON values.
        """
        number = self._epoch.number
        if not core.recovered or self._writer is None:
            self._tell(StateRecorded(self._learner, core.incarnation, number, None))
            return
        if self._writing is not None and not self._writing.done():
            self._give_up(core, "the part before this one is still being written")
            return
        try:
            copies, values = arrays()
        except Exception as error:  # as when the devices have no memory for a copy; the steps go on
            self._give_up(core, f"the state cannot be copied: {type(error).__name__}: {error}")
            return
        told = {
            "learner": self._learner,
            "incarnation": core.incarnation,
            "clock": core.clock,
            "fragments": fragments_to_json(core.fragments),
            **values,
            **state,
        }
        self._mark(core, core.vector_clock)
        self._writing = self._writer.write(number, learner_part(self._learner), Part(copies, told))
        self._writing.add_done_callback(lambda done: self._tell(PartWritten.of(self._learner, number, done)))

    def _mark(self, core: LearnerCore, clock: VectorClock | None) -> None:
        self._tell(StateRecorded(self._learner, core.incarnation, self._epoch.number, clock))

    def _give_up(self, core: LearnerCore, problem: str) -> None:
        self._mark(core, core.vector_clock)
        self._tell(PartWritten(self._learner, self._epoch.number, None, problem.splitlines()[0]))
