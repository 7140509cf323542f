"""What a run ends with."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The global model at the end, and how the run went."""

    params: dict[str, np.ndarray] | None  # None: a run without arrays
    step: int
    eval_loss: float | None  # nats per token
    finished: bool  # every round up to the last step ended; False after an interruption or a failure
    failure: str | None  # one line or more on why the run failed; None if it did not
