"""What a part of the syncer gives to a snapshot: its fragments, once learners know of the snapshot."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence

from ddiloco.outer.global_model import FragmentState
from ddiloco.protocol import news
from ddiloco.protocol.messages import RoundId
from ddiloco.protocol.state import SyncerState
from ddiloco.storage.array_names import named
from ddiloco.storage.snapshots.parts import PartFiles, PartWriter, SnapshotPart, fragments_part
from ddiloco.workers.snapshots.messages import FragmentsWritten, PartWritten


class FragmentsRecording:
    """Used by the part's thread; only writing is done on another.

    An offer that was made after its learner had recorded its state waits until this part has, too: offers and
    the word of the snapshot come over different connections. That word comes within `patience` seconds, or
    never: a syncer on an older disk knows lower numbers than the learners, and would wait for their offers.
    """

    def __init__(
        self,
        part: int,
        own: Sequence[int],
        epoch: int,
        writer: PartWriter,
        send: Callable[[FragmentsWritten], None],
        patience: float,
    ) -> None:
        """`own`: the part's fragments. `epoch`: the newest snapshot, which is not under way any more.

        `send` tells the authority, from any thread.
        """
        self._part, self._own = part, own
        self._recorded = self._begun = epoch
        self._writer, self._send = writer, send
        self._writing: concurrent.futures.Future[PartFiles] | None = None  # the newest of its parts
        self._patience = patience
        self._ahead: dict[int, tuple[int, float]] = {}  # by learner, its snapshot and since when it is known

    def awaits(self, learner: int, epoch: int, now: float) -> bool:
        """Whether an offer that the learner made after snapshot `epoch` has to wait for that, or longer."""
        if epoch <= self._recorded:
            return False
        if self._ahead.get(learner, (0, 0.0))[0] != epoch:
            self._ahead[learner] = epoch, now
        return now - self._ahead[learner][1] <= self._patience

    def begun(self, number: int) -> None:
        """The authority has begun a snapshot; the fragments are being gathered."""
        self._begun = max(self._begun, number)

    def missed(self, number: int) -> None:
        """Snapshot `number` is over, begun here or not, and any before."""
        self._recorded = self._begun = number

    def record(self, state: SyncerState, fragments: Sequence[FragmentState]) -> None:
        """Has the fragments as they are now written.

        Args:
          state: what was merged of them.
          fragments: those gathered; (): they could not be copied.
        """
        if self._recorded >= self._begun:
            return  # it is over, or what was gathered for one that was given up has served for it
        number, self._recorded = self._begun, self._begun
        versions = []
        arrays = {}
        for p, fragment in zip(self._own, fragments, strict=False):
            at = RoundId(state.merged_steps[p], p)
            versions.append(news.Committed(at, fragment.version, state.lineages[p]))
            arrays |= named(f"fragment/{p}", fragment.pieces) | named(f"outer/{p}", fragment.optimizer)
        problem = "" if fragments else "its fragments could not be copied"
        if self._writing is not None and not self._writing.done():
            problem = "the part before this one is still being written"
        if problem:
            self._send(FragmentsWritten(self._part, number, None, (), problem))
            return
        name = fragments_part(self._part)
        self._writing = self._writer.write(number, name, SnapshotPart(arrays, {"fragments": list(self._own)}))

        def written(done: concurrent.futures.Future[PartFiles]) -> None:
            result = PartWritten.of(self._part, number, done)
            told = FragmentsWritten(self._part, number, result.files, tuple(versions), result.problem)
            self._send(told)

        self._writing.add_done_callback(written)
