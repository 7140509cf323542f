"""A learner's part of a snapshot: copied on its devices between two steps, written by another thread."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.snapshot import Epoch
from ddiloco.protocol.work import FragmentWork
from ddiloco.storage.snapshots.parts import PartFiles, PartWriter, SnapshotPart, learner_part
from ddiloco.telemetry.records import reason
from ddiloco.workers.snapshots.messages import PartWritten, SnapshotMessage, StateRecorded


def fragments_to_json(fragments: Sequence[FragmentWork]) -> list[list[Any]]:
    """By fragment: version, the step it was merged at, steps and tokens since, and lineage."""
    return [[f.version, f.merged_step, f.steps, f.tokens, f.lineage] for f in fragments]


def fragments_from_json(rows: Sequence[Sequence[Any]]) -> list[FragmentWork]:
    """The fragments from what `fragments_to_json` gave."""
    return [FragmentWork(*row) for row in rows]


class LearnerRecording:
    """Takes part in snapshots for one learner, on the learner's thread; only writing is done on another."""

    def __init__(
        self, learner: int, writer: PartWriter | None, send: Callable[[SnapshotMessage], None]
    ) -> None:
        """`send` sends a message to the syncer, without waiting, from this thread or the writer's.

        `writer` is None for a learner that has nowhere to write; it is absent from all snapshots.
        """
        self._learner, self._writer, self._send = learner, writer, send
        self._epoch = Epoch()
        self._writing: concurrent.futures.Future[PartFiles] | None = None

    def sees(self, number: int) -> bool:
        """Whether to record the state now, before the message with this number is handled."""
        return self._epoch.sees(number)

    def record(
        self,
        core: LearnerCore,
        arrays: Callable[[], tuple[dict[str, Any], dict[str, Any]]],
        state: dict[str, Any],
    ) -> None:
        """Records the learner's state now, and has it written.

        Args:
          core: the learner's.
          arrays: copies the arrays on the devices; gives them, and JSON values that belong to them.
          state: other JSON values for the part.
        """
        number, writer = self._epoch.number, self._writer if core.recovered else None
        if writer is None:
            self._send(StateRecorded(self._learner, core.incarnation, number, None))
            return
        self._send(StateRecorded(self._learner, core.incarnation, number, core.clock, core.versions))
        if self._writing is not None and not self._writing.done():
            self._give_up("the part before this one is still being written")
            return
        try:
            copies, of_arrays = arrays()
        except Exception as error:  # such as no memory for a copy; training goes on
            self._give_up(f"the state cannot be copied: {reason(error)}")
            return
        values = {
            "learner": self._learner,
            "incarnation": core.incarnation,
            "clock": core.clock,
            "fragments": fragments_to_json(core.work.fragments),
            **of_arrays,
            **state,
        }
        self._writing = writer.write(number, learner_part(self._learner), SnapshotPart(copies, values))
        self._writing.add_done_callback(lambda done: self._send(PartWritten.of(self._learner, number, done)))

    def _give_up(self, problem: str) -> None:
        self._send(PartWritten(self._learner, self._epoch.number, None, problem))
