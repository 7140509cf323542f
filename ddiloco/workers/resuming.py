"""Resuming a learner from its own checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ddiloco.arrays.blocks import Blocks
from ddiloco.outer.fragments import FragmentLayout
from ddiloco.protocol.messages import Watermark
from ddiloco.settings.experiment import Experiment
from ddiloco.storage.learner_state import LearnerState
from ddiloco.storage.tape.entries import InnerOrigin
from ddiloco.storage.tape.header import ResumedWith
from ddiloco.workers.exchange import InnerState
from ddiloco.workers.learner_arrays import TrainingArrays


@dataclasses.dataclass(frozen=True)
class ResumedLearner:
    """A learner's earlier state."""

    begins_with: ResumedWith  # what its core begins with
    tokens: int  # that it had trained on
    trained: int  # inner steps in its inner state
    arrays: dict[str, np.ndarray | Blocks]  # until they are loaded
    values: Mapping[str, Any]

    def load(self, arrays: TrainingArrays) -> None:
        """Loads the state onto the learner's devices, and sets the batches' position.

        Then the host keeps no copy of it, although this object lives as long as the learner.
        """
        arrays.restore(self.arrays, self.values)
        self.arrays.clear()


def about_states(experiment: Experiment, layout: FragmentLayout, run: str, learner: int) -> dict[str, Any]:
    """The run's identity as in headers of the learner's states; others are not resumed."""
    outer, rebase = experiment.outer, experiment.sync.rebase
    own = outer.with_codec(outer.codec_of(learner))
    return {
        "run": run,
        "layout": layout.fingerprint,
        "codec": (own.codec, own.error_feedback, rebase),
        "gradients": own.all_exact and not outer.all_exact and not rebase,
        "num_shards": experiment.num_data_shards,
    }


def from_checkpoint(
    state: LearnerState, about: Mapping[str, Any], merged: Sequence[Watermark], versions: Sequence[int]
) -> ResumedLearner | None:
    """A learner's resumption of its own earlier state; None: only the inner state can be used.

    Only the inner state can be used if data are divided differently, so that others may read the data of its
    unmerged work; if offers were encoded differently; or if all fragments have newer versions, as nothing in
    it can be merged and a peer's inner state may be newer.

    `about`: as of `about_states`. `merged`: the furthest work of the learner that is, or may still be,
    merged, by shard of the syncer; its data continue behind that, or at the end of the state if later.
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
