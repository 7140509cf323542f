"""The settings `config.tape`, `config.recovery` and `config.snapshot`: what a run leaves to go on with."""

from __future__ import annotations

import dataclasses

from ddiloco.config import setting


@dataclasses.dataclass(frozen=True)
class TapeConfig:
    """Whether a run can be replayed."""

    enabled: bool = setting(True, "whether learners and syncer record their events on tapes, for replay")


@dataclasses.dataclass(frozen=True)
class RecoveryConfig:
    """State kept for restarted processes."""

    checkpoint_every: float = setting(
        60.0,
        "seconds between two checkpoints of a learner, which it also writes as it leaves; 0: none",
        at_least=0.0,
    )
    checkpoint_folder: str = setting(
        "", "folder for these, also in a bucket (gs://...); empty: the workdir of each. In learners/ there"
    )
    keep_versions: int = setting(
        3,
        "newest versions of each fragment on the syncer's disk, to roll back to; 1: only the current one",
        at_least=1,
    )


@dataclasses.dataclass(frozen=True)
class SnapshotConfig:
    """Interval, number and timeout of snapshots."""

    every: int = setting(0, "global steps between two; 0: none", at_least=0)
    keep: int = setting(2, "number of complete snapshots kept, the newest", at_least=1)
    timeout: float = setting(
        120.0,
        "seconds for learners to write their checkpoints; more for many bytes and long steps",
        above=0.0,
    )
