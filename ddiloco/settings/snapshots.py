"""Settings of the snapshots of a whole run."""

from __future__ import annotations

import dataclasses

from ddiloco.config import setting


@dataclasses.dataclass(frozen=True)
class SnapshotConfig:
    """How often a snapshot is taken, how many are kept, and when one is given up."""

    every: int = setting(0, "global steps between two; 0: none", at_least=0)
    keep: int = setting(2, "complete ones that are kept, the newest", at_least=1)
    timeout: float = setting(120.0, "seconds until one that is not complete is given up", above=0.0)
