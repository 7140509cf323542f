"""Going on from a snapshot as after a partition that healed: everybody comes back with what it held then."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ddiloco.data.shards import reshard
from ddiloco.disk.durable import Start
from ddiloco.disk.snapshots.parts import SYNCER_PART, learner_part
from ddiloco.disk.snapshots.store import Part, Snapshot, SnapshotError
from ddiloco.disk.tape.entries import InnerOrigin
from ddiloco.disk.tape.header import Returned
from ddiloco.outer.fragments import FragmentLayout
from ddiloco.outer.global_model import FragmentState
from ddiloco.protocol.learner import FragmentWork
from ddiloco.protocol.state import SyncerState
from ddiloco.roles.delivery import InnerState, Pieces
from ddiloco.roles.learner_arrays import TrainingArrays
from ddiloco.roles.snapshots.recording import fragments_from_json
from ddiloco.roles.transfer import FragmentTransfer
from ddiloco.settings.experiment import Experiment

_CODEC_STATE = ("anchor", "residual", "left")  # what a learner keeps for the codec of its outer gradients


@dataclasses.dataclass(frozen=True)
class ReturningLearner:
    """A learner as a snapshot has it, with the updates applied that were then on their way to it.

    Attributes:
      returned: with what it comes back: its global step, and its counters by fragment; none for work that an
        update has overwritten.
      tokens: that its process had trained on.
    """

    returned: Returned
    tokens: int
    _arrays: Mapping[str, np.ndarray]
    _values: Mapping[str, Any]
    _updates: Mapping[int, Pieces]

    def load(self, arrays: TrainingArrays, mixing: float) -> None:
        """Puts the state onto the learner's devices, and its batches where they were."""
        arrays.restore(self._arrays, self._values)
        for p, pieces in self._updates.items():
            arrays.apply(p, mixing, pieces)


class Origin:
    """A snapshot that another run goes on from, in wall-clock time or with changed settings."""

    def __init__(self, snapshot: Snapshot, experiment: Experiment, layout: FragmentLayout) -> None:
        """Reads the syncer's part, and where each learner was in its data.

        Raises:
          SnapshotError: it has been damaged since the snapshot was opened, or is of another model.
          DataError: the positions are of other data.
        """
        header = snapshot.header
        if header["layout"] != layout.fingerprint:
            raise SnapshotError(f"{snapshot.folder}: is of another model, or of other fragments")
        self.name = snapshot.name
        self.learners: tuple[int, ...] = tuple(header["learners"])  # that have a part
        self._snapshot = snapshot
        outer = header["experiment"]["outer"]
        told = (outer["codec"], outer["error_feedback"])
        self._same_codec = told == (experiment.outer.codec, experiment.outer.error_feedback)
        part = snapshot.part(SYNCER_PART)
        state = SyncerState(
            tuple(part.state["versions"]),
            tuple(part.state["merged_steps"]),
            tuple((int(learner), int(number)) for learner, number in part.state["incarnations"]),
        )
        fragments = [
            FragmentState(version, _numbered(part, f"fragment/{p}"), _numbered(part, f"outer/{p}"))
            for p, version in enumerate(state.versions)
        ]
        self.start = Start(state, fragments)

    @functools.cached_property
    def tokens(self) -> dict[int, int]:
        """By learner that has a part: the tokens that it had trained on."""
        return {m: int(self._part(m).state["tokens"]) for m in self.learners}

    def positions(self, num_learners: int) -> list[dict[str, Any] | None]:
        """Where the batches of each learner of now go on; None: at their beginning.

        Raises:
          DataError: the positions are of other data.
        """
        states = [self._part(m).state["position"] for m in self.learners]
        return list(reshard(states, num_learners)) if states else [None] * num_learners

    def incarnation(self, learner: int) -> int:
        """Under which the learner comes back, or joins."""
        known = dict(self.start.state.incarnations).get(learner, 0)
        told = self._part(learner).state["incarnation"] if learner in self.learners else 0
        return 1 + max(known, told)

    def learner(
        self, learner: int, position: dict[str, Any] | None, transfer: FragmentTransfer
    ) -> ReturningLearner | None:
        """The learner, if it has a part; `position` is where its batches go on, and `transfer` its own.

        Raises:
          SnapshotError: the part has been damaged since the snapshot was opened.
        """
        if learner not in self.learners:
            return None
        part = self._part(learner)
        fragments, clock, updates = self._updated(part.state)
        arrays = {name: x for name, x in part.arrays.items() if name.split("/")[0] not in _CODEC_STATE}
        if transfer.keeps_anchors:
            arrays |= self._codec_state(part, transfer.error_feedback)
        values = {"position": position, "steps": part.state["steps"]}
        returned = Returned(self.name, clock, tuple(fragments))
        return ReturningLearner(returned, part.state["tokens"], arrays, values, updates)

    def donated(self) -> InnerState | None:
        """The inner state that a learner without a part begins with: that of the lowest number."""
        if not self.learners:
            return None
        donor = self.learners[0]
        part = self._part(donor)
        versions = tuple(row[0] for row in part.state["fragments"])
        known = InnerOrigin(donor, 0, self.name.number)
        return InnerState(part.state["clock"], versions, _numbered(part, "inner"), known)

    def _part(self, learner: int) -> Part:
        return self._snapshot.part(learner_part(learner))

    def _updated(self, told: Mapping[str, Any]) -> tuple[list[FragmentWork], int, dict[int, Pieces]]:
        """Counters and clock after the updates that were on their way; and these, by fragment."""
        fragments, clock, updates = fragments_from_json(told["fragments"]), told["clock"], {}
        state = self.start.state
        for p, own in enumerate(fragments):
            if own.version < state.versions[p]:
                fragments[p] = FragmentWork(state.versions[p], state.merged_steps[p])
                clock = max(clock, state.merged_steps[p])
                updates[p] = self.start.fragments[p].pieces
        return fragments, clock, updates

    def _codec_state(self, part: Part, error_feedback: bool) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = {}
        for p, fragment in enumerate(self.start.fragments):
            for i, piece in enumerate(fragment.pieces):
                arrays[f"anchor/{p}/{i}"] = piece
                if error_feedback:
                    kept = part.arrays.get(f"residual/{p}/{i}") if self._same_codec else None
                    arrays[f"residual/{p}/{i}"] = np.zeros_like(piece) if kept is None else kept
        if error_feedback and self._same_codec:
            arrays |= {name: x for name, x in part.arrays.items() if name.startswith("left/")}
        return arrays


def _numbered(part: Part, prefix: str) -> tuple[np.ndarray, ...]:
    """The arrays `<prefix>/0`, `<prefix>/1` and so on."""
    count = sum(name.rpartition("/")[0] == prefix for name in part.arrays)
    return tuple(part.arrays[f"{prefix}/{i}"] for i in range(count))


class DonatedInner:
    """The `Recovery` of learners that join a run which goes on from a snapshot that has no part of them."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin

    def inner_state(self, versions: tuple[int, ...]) -> InnerState | None:
        """The inner state of one of the parts; None if there is no part."""
        return self._origin.donated()

    def finished(self, position: dict[str, Any]) -> None:
        """Nothing follows from it: such a learner's thread is followed by none."""
