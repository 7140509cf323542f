"""Which snapshot a run of processes resumes from, kept for a restarted syncer."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping

from ddiloco.storage import array_file
from ddiloco.storage.durable import DurableState
from ddiloco.storage.snapshots.store import Snapshot
from ddiloco.storage.tape.header import SnapshotName
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.positions import with_positions
from ddiloco.workers.resuming import Origin

_NAME = "resumed_from.json"


@dataclasses.dataclass(frozen=True)
class ResumedFrom:
    """A snapshot, and by learner the newest incarnation that it knows of."""

    name: SnapshotName
    incarnations: Mapping[int, int]

    def number_for(self, learner: int, newest_incarnation: int) -> int:
        """The snapshot's number for a learner that has not resumed from it; 0 for one that has."""
        return self.name.number if newest_incarnation <= self.incarnations.get(learner, 0) else 0

    def save(self, folder: pathlib.Path) -> None:
        """Keeps it in the syncer's folder; raises OSError."""
        incarnations = {str(m): i for m, i in self.incarnations.items()}
        values = {"snapshot": dataclasses.asdict(self.name), "incarnations": incarnations}
        array_file.replace(folder / _NAME, [json.dumps(values).encode()])

    @classmethod
    def load(cls, folder: pathlib.Path) -> ResumedFrom | None:
        """What `save` kept; None if there is nothing that can be read: then all join as new learners."""
        try:
            values = json.loads((folder / _NAME).read_text())
            name = SnapshotName(int(values["snapshot"]["number"]), str(values["snapshot"]["sha256"]))
            return cls(name, {int(m): int(i) for m, i in values["incarnations"].items()})
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return None


def begin_from(snapshot: Snapshot, assembly: Assembly, durable: DurableState) -> None:
    """Takes the syncer's durable state and the learners' positions from the snapshot.

    Raises:
      DataError: the snapshot is of other data.
      OSError: the disk refuses.
      SnapshotError: it has been damaged since it was opened.
    """
    e = assembly.experiment
    origin = Origin(snapshot, e, assembly.layout)
    known = dict(origin.start.state.incarnations)
    known |= {m: max(known.get(m, 0), origin.incarnation(m) - 1) for m in origin.learners}
    found = enumerate(origin.positions(e))
    positions = {m: json.dumps(position) for m, position in found if position is not None}
    durable.replace(origin.start._replace(state=with_positions(origin.start.state, positions)))
    ResumedFrom(snapshot.name, known).save(durable.folder)
