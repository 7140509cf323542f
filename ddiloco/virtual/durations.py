"""How long things take in virtual time: seconds that stay the same, or are drawn anew each time."""

from __future__ import annotations

import dataclasses
import random


@dataclasses.dataclass(frozen=True)
class Steady:
    """The same seconds each time."""

    seconds: float

    def __call__(self) -> float:
        """The seconds."""
        return self.seconds


class Varying:
    """A mean, times a normal factor about 1 that is cut off where the time would come near 0."""

    def __init__(self, mean: float, deviation: float, rng: random.Random) -> None:
        """`deviation`: of the factor; 0: nothing is drawn. `rng`: its own stream."""
        self.mean, self.deviation = mean, deviation
        self._rng = rng

    def __call__(self) -> float:
        """The next seconds."""
        return self.mean * spread(self._rng, self.deviation)


def spread(rng: random.Random, deviation: float) -> float:
    """A normal factor about 1, at least a tenth; 1, with nothing drawn, where the deviation is 0."""
    return max(0.1, rng.gauss(1.0, deviation)) if deviation else 1.0
