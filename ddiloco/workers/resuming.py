"""A run resumes from a snapshot: each process continues with the state that it had, and they reconnect."""

from __future__ import annotations

import dataclasses
import functools
import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ddiloco.arrays.blocks import Blocks, Cut
from ddiloco.data.shards import reshard
from ddiloco.outer.fragments import FragmentLayout
from ddiloco.outer.global_model import FragmentState
from ddiloco.protocol.messages import NOTHING_MERGED, Watermark
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.work import FragmentWork, LearnerWork
from ddiloco.settings.experiment import Experiment
from ddiloco.storage.array_names import named, numbered, of_kind
from ddiloco.storage.durable import Start
from ddiloco.storage.learner_state import LearnerState
from ddiloco.storage.snapshots.parts import SYNCER_PART, Needs, is_fragments_part, learner_part
from ddiloco.storage.snapshots.store import Snapshot, SnapshotError, SnapshotPart
from ddiloco.storage.tape.entries import InnerOrigin
from ddiloco.storage.tape.header import ResumedWith
from ddiloco.workers.exchange import InnerState, Pieces
from ddiloco.workers.learner_arrays import TrainingArrays
from ddiloco.workers.snapshots.recording import fragments_from_json
from ddiloco.workers.transfer import FragmentTransfer

_CODEC_STATE = ("anchor", "residual", "own", "left")  # kept by a learner for its outer gradients


@dataclasses.dataclass(frozen=True)
class ResumedLearner:
    """A learner's state of before: a checkpoint, or a snapshot's with updates that were on their way."""

    begins_with: ResumedWith  # what its core begins with; work that such an update overwrites is not counted
    tokens: int  # how many it had trained on
    trained: int  # inner steps that its inner state has taken in
    arrays: dict[str, np.ndarray | Blocks]  # until they are loaded
    values: Mapping[str, Any]
    updates: dict[int, Pieces] = dataclasses.field(default_factory=dict)  # by fragment, likewise

    def load(self, arrays: TrainingArrays, mixing: float) -> None:
        """Loads the state onto the learner's devices, sets the batches' position and applies the updates.

        Then the host has no copy of them any more, whoever holds this for as long as the learner trains.
        """
        arrays.restore(self.arrays, self.values)
        for p, pieces in self.updates.items():
            arrays.apply(p, mixing, pieces)
        self.arrays.clear()
        self.updates.clear()


def about_states(experiment: Experiment, layout: FragmentLayout, run: str) -> dict[str, Any]:
    """What the headers of learners' states say of the run: one that says otherwise is not gone on with."""
    outer = experiment.outer
    return {
        "run": run,
        "layout": layout.fingerprint,
        "codec": (outer.codec, outer.error_feedback, experiment.sync.rebase),
        "num_shards": experiment.num_data_shards,
    }


def from_checkpoint(
    state: LearnerState, about: Mapping[str, Any], merged: Sequence[Watermark], versions: Sequence[int]
) -> ResumedLearner | None:
    """How a learner goes on with its own state of before; None: only the inner state can be used.

    So it is where the data are dealt otherwise, which may give others what is in work of the state that is
    not merged, where its offers were encoded otherwise, and where all fragments have newer versions: then
    nothing in it can be merged, and a peer's inner state may be newer.

    `about`: as `about_states` gives it. `merged`: the furthest work of the learner that is merged, or may be,
    by shard of the syncer; its data go on after all of it, or where the state ends if that is later.
    `versions`: the newest, by fragment.
    """
    header, position = state.header, state.header.position
    if any(getattr(header, name) != value for name, value in about.items()):
        return None
    if not any(own.version >= newest for own, newest in zip(header.work.fragments, versions, strict=True)):
        return None
    after = header.work.begins_after(merged)
    if after is None:
        return None
    if after.bare != header.work.reached:
        position = json.loads(after.position) if after.position else None
    origin = None if header.origin is None else InnerOrigin(*header.origin)
    values = {"position": position, "steps": header.steps}
    begins_with = ResumedWith(header.work, after.bare, origin=origin)
    return ResumedLearner(begins_with, header.tokens, header.trained, dict(state.arrays), values)


def inner_of(state: LearnerState) -> InnerState:
    """The inner optimizer state alone."""
    header = state.header
    versions = tuple(fragment.version for fragment in header.work.fragments)
    origin = None if header.origin is None else InnerOrigin(*header.origin)
    return InnerState(header.work.clock, versions, state.inner, origin, header.trained)


def run_of(snapshot: Snapshot | None) -> str:
    """The id of the run that resumes from the snapshot, or of one that begins."""
    return (snapshot is not None and snapshot.header.get("run")) or secrets.token_hex(16)


class Origin:
    """The snapshot that a run resumes from. Each part is read only when something in it is needed.

    A learner's process thus reads its own part, and of the syncer's the fragments in which its own is behind.
    Reading what is damaged raises SnapshotError.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        experiment: Experiment,
        layout: FragmentLayout,
        needs: Needs | None = None,
    ) -> None:
        """`needs`: of a learner's arrays, where this is one of its hosts.

        Raises:
          SnapshotError: the snapshot is of another model or other fragments.
        """
        header = snapshot.header
        if header["layout"] != layout.fingerprint:
            raise SnapshotError(f"{snapshot.folder}: is of another model, or of other fragments")
        self.name = snapshot.name
        self.learners: tuple[int, ...] = tuple(header["learners"])  # those with a part in it
        self._versions: tuple[int, ...] = tuple(header["versions"])
        self._watermarks = tuple(
            {int(m): Watermark(*mark) for m, mark in known.items()} for known in header["watermarks"]
        )
        self._snapshot, self._needs, self._band = snapshot, needs, experiment.sync.band
        outer = header["experiment"]["outer"]
        codec = (outer["codec"], outer["error_feedback"])
        self._same_codec = codec == (experiment.outer.codec, experiment.outer.error_feedback)

    @functools.cached_property
    def start(self) -> Start:
        """The state that the syncer begins with."""
        arrays = self._syncers_arrays()
        fragments = {
            p: FragmentState(version, numbered(f"fragment/{p}", arrays), numbered(f"outer/{p}", arrays))
            for p, version in enumerate(self._state.versions)
        }
        return Start(self._state, fragments)

    @functools.cached_property
    def tokens(self) -> dict[int, int]:
        """By learner with a part: the tokens that it had trained on."""
        return {m: int(state["tokens"]) for m, state in self._states.items()}

    def positions(self, experiment: Experiment) -> list[dict[str, Any] | None]:
        """Where the batches of each learner of the resumed run begin; None: at their start.

        Raises:
          DataError: the snapshot is of other data.
        """
        states, learners = [state["position"] for state in self._states.values()], experiment.most_learners
        if not states:
            return [None] * learners
        groups = [experiment.data_shards((m,)) for m in range(learners)]
        return list(reshard(states, experiment.num_data_shards, groups))

    def incarnation(self, learner: int) -> int:
        """The learner's next incarnation."""
        known = dict(self._state.incarnations).get(learner, 0)
        own = self._states[learner]["incarnation"] if learner in self.learners else 0
        return 1 + max(known, own)

    def learner(
        self, learner: int, position: dict[str, Any] | None, transfer: FragmentTransfer
    ) -> ResumedLearner | None:
        """The learner's state, or None if it has no part; `position` is where its batches begin.

        An update that was on its way is taken as if no offer of the learner's were in it, which the snapshot
        does not say: the steps since such an offer are lost, with `sync.rebase`, too.
        """
        if learner not in self.learners:
            return None
        part = self._snapshot.part(learner_part(learner), self._needs)
        fragments, clock = fragments_from_json(part.state["fragments"]), part.state["clock"]
        arrays = {name: x for name, x in part.arrays.items() if name.split("/")[0] not in _CODEC_STATE}
        lacking = [p for p, own in enumerate(fragments) if own.version < self._versions[p]]
        wanted = set(lacking)
        if transfer.keeps_anchors:
            wanted |= {p for p in range(len(fragments)) if not of_kind(f"anchor/{p}", part.arrays)}
        pieces = self._pieces(wanted)
        if transfer.keeps_anchors:
            arrays |= self._codec_state(part, pieces, transfer.error_feedback)
        for p in lacking:
            merged_step, lineage = self._state.merged_steps[p], self._state.lineages[p]
            fragments[p] = FragmentWork(self._versions[p], merged_step, lineage=lineage)
            if merged_step - clock > self._band:
                clock = merged_step
        marks = [known.get(learner, NOTHING_MERGED) for known in self._watermarks]
        for fragment, mark in zip(fragments, marks, strict=True):
            fragment.watermark = mark
        reached = max(marks)
        updates = {p: pieces[p] for p in lacking}
        values = {"position": position, "steps": part.state["steps"]}
        work = LearnerWork(clock, reached.life, reached.steps, tuple(fragments))
        begins_with = ResumedWith(work, snapshot=self.name)
        steps, tokens = part.state["steps"], part.state["tokens"]
        return ResumedLearner(begins_with, tokens, steps, arrays, values, updates)

    def donated(self) -> InnerState | None:
        """The inner state for a learner without a part: that of the lowest numbered part."""
        if not self.learners:
            return None
        donor = self.learners[0]
        part = self._snapshot.part(learner_part(donor))
        versions = tuple(row[0] for row in part.state["fragments"])
        known = InnerOrigin(donor, 0, self.name.number)
        inner = [np.array(leaf) for leaf in numbered("inner", part.arrays)]  # else all of the part would stay
        return InnerState(part.state["clock"], versions, inner, known, part.state["steps"])

    @functools.cached_property
    def _states(self) -> dict[int, dict[str, Any]]:
        return {m: self._snapshot.state(learner_part(m)) for m in self.learners}

    @functools.cached_property
    def _state(self) -> SyncerState:
        """What the syncer knew beside its arrays."""
        values = self._snapshot.state(SYNCER_PART)
        return SyncerState(
            tuple(values["versions"]),
            tuple(values["merged_steps"]),
            tuple((int(learner), int(number)) for learner, number in values["incarnations"]),
            tuple(values["lineages"]),
            self._watermarks,
        )

    def _syncers_arrays(self, needs: Needs | None = None) -> dict[str, Any]:
        """The syncer's arrays, also where it was several processes."""
        parts = [SYNCER_PART, *filter(is_fragments_part, self._snapshot.parts)]
        return {name: x for part in parts for name, x in self._snapshot.part(part, needs).arrays.items()}

    def _pieces(self, fragments: Collection[int]) -> dict[int, Pieces]:
        """What a learner needs of the syncer's pieces of these fragments; other files are not read."""

        def needs(name: str, shape: tuple[int, ...]) -> Cut:
            kind, _, rest = name.partition("/")
            if kind != "fragment" or int(rest.partition("/")[0]) not in fragments:
                return Cut(shape, ())
            return Cut.whole(shape) if self._needs is None else self._needs(name, shape)

        arrays = self._syncers_arrays(needs) if fragments else {}
        found = {p: numbered(f"fragment/{p}", arrays) for p in fragments}
        return found if self._needs else {p: tuple(x.all for x in pieces) for p, pieces in found.items()}

    def _codec_state(
        self, part: SnapshotPart, pieces: Mapping[int, Pieces], error_feedback: bool
    ) -> dict[str, np.ndarray | Blocks]:
        """For each fragment, the version that offers are encoded against, and what encodings left out.

        Where an update was on its way, in `pieces`, that is nothing: if an offer of the learner's is in it,
        what was left out before was sent along.
        """
        arrays: dict[str, np.ndarray | Blocks] = {}
        for p in range(len(self._versions)):
            known = {} if p in pieces else part.arrays
            anchor = pieces.get(p) or numbered(f"anchor/{p}", known)
            arrays |= named(f"anchor/{p}", anchor)
            if error_feedback:
                kept = numbered(f"residual/{p}", known) if self._same_codec else ()
                arrays |= named(f"residual/{p}", kept or [np.zeros(x.shape, np.float32) for x in anchor])
        return arrays
