"""The newest timing of a run's rounds, and the measured gain of its last change."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from ddiloco.protocol.policy import TIMING
from ddiloco.telemetry.loss_estimate import ERROR, loss_percent

ROUNDS = 48  # that are compared, before and after a change


class TimingLog:
    """Compares the rounds before a change of the timing with as many after it.

    Attributes:
      settings: of config.sync, by name, as they were set last; empty: as in the config.
      reason: why they were.
      step: from which rounds follow them.
    """

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.reason, self.step = "", 0
        self._rounds: collections.deque[tuple[float, float, float]] = collections.deque(maxlen=ROUNDS)
        self._before: float | None = None  # the estimate, while it is to be compared
        self._left = 0  # rounds until then

    def set(self, values: Mapping[str, Any]) -> None:
        """Records the timing that a shard of the syncer has set; others may have set it before."""
        settings = {name: values[name] for name in TIMING if name in values}
        if settings == self.settings:
            return
        self.settings, self.reason = settings, str(values.get("reason", ""))
        self.step = int(values.get("step", 0))
        self._before = self._estimate() if len(self._rounds) == ROUNDS else None
        self._left = ROUNDS
        self._rounds.clear()

    def add(self, work: float, age: float, share: float) -> dict[str, Any] | None:
        """Adds a merge: steps in its contributions, their age, and the share of learners in it.

        Returns what the last change has gained, once there are as many merges after it as before it.
        """
        self._rounds.append((work, age, share))
        if self._before is None:
            return None
        self._left -= 1
        if self._left:
            return None
        gained, self._before = self._before - self._estimate(), None
        return {"step": self.step, "reason": self.reason, "gained_percent": round(gained, 2), "error": ERROR}

    def _estimate(self) -> float:
        work, age, share = (sum(values) / len(self._rounds) for values in zip(*self._rounds, strict=True))
        return loss_percent(work, age, share, codec="f32")  # the codec stays
