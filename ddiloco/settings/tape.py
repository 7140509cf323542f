"""Settings of the tapes."""

from __future__ import annotations

import dataclasses

from ddiloco.config import setting


@dataclasses.dataclass(frozen=True)
class TapeConfig:
    """Whether a run can be replayed."""

    enabled: bool = setting(True, "whether learners and syncer write down what they are told, for replay")
