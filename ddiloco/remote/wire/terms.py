"""What learners and syncer must have in common before they exchange a fragment."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence

from ddiloco.outer.codecs import ArrayFormat
from ddiloco.outer.encoding import wire_format
from ddiloco.outer.fragments import FragmentLayout
from ddiloco.settings.experiment import Experiment, all_settings


@dataclasses.dataclass(frozen=True)
class Terms:
    """What both ends must have in common, or their arrays or decisions would not fit.

    Attributes:
      fingerprint: of the fragment layout.
      rules: of the settings that both sides decide by.
      num_learners: M; learners are numbered below it.
      up: by fragment, shapes and dtypes of what a learner sends.
      down: the same of what the syncer sends.
      offer_timeout: seconds that a fragment may take.
    """

    fingerprint: str
    rules: str
    num_learners: int
    up: Sequence[Sequence[ArrayFormat]]
    down: Sequence[Sequence[ArrayFormat]]
    offer_timeout: float

    @property
    def num_fragments(self) -> int:
        """P."""
        return len(self.up)


def terms_of(experiment: Experiment, layout: FragmentLayout) -> Terms:
    """The terms of an experiment whose number of steps is known."""
    codec, fragments = experiment.outer.codec, range(layout.num_fragments)
    rules = {leaf.path: leaf.value for leaf in all_settings(experiment) if leaf.metadata["both_ends"]}
    return Terms(
        fingerprint=layout.fingerprint,
        rules=hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest(),
        num_learners=experiment.sync.num_learners,
        up=[wire_format(layout, p, codec) for p in fragments],
        down=[wire_format(layout, p, "f32") for p in fragments],
        offer_timeout=experiment.sync.offer_timeout,
    )
