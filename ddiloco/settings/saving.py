"""The settings `config.tape` and `config.snapshot`: what a run leaves to be replayed or resumed."""

from __future__ import annotations

import dataclasses

from ddiloco.config import setting


@dataclasses.dataclass(frozen=True)
class TapeConfig:
    """Whether a run can be replayed."""

    enabled: bool = setting(True, "whether learners and syncer record their events on tapes, for replay")


@dataclasses.dataclass(frozen=True)
class SnapshotConfig:
    """How often snapshots are taken, how many are kept, and when one is given up."""

    every: int = setting(0, "global steps between two; 0: none", at_least=0)
    keep: int = setting(2, "complete ones that are kept, the newest", at_least=1)
    timeout: float = setting(
        120.0,
        "seconds until one that is not complete is given up; more for many bytes and long steps",
        above=0.0,
    )
