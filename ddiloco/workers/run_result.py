"""The result of a run."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The global model at the end, and how the run went."""

    params: dict[str, np.ndarray] | None  # None for a run without arrays
    step: int
    eval_loss: float | None  # nats per token
    finished: bool  # whether every round up to the last step ended, without interruption or failure
    failure: str | None  # why the run failed, one line or more; None if it did not
    sample: str | None = None  # if it was made in the run; else it is made of `params`
