"""When a learner records its state, so that the states of a snapshot are of one consistent cut."""

from __future__ import annotations


class Epoch:
    """The number of the newest snapshot that a learner has recorded its state for.

    The syncer records its own state as it begins one. Its messages carry the number from then on (Lai and
    Yang 1987): a learner handles one with a larger number only after it has recorded its state, so that the
    channel to it need not keep the order. The channel from it does: what comes before its word that it has
    recorded (a mark, Chandy and Lamport 1985) was in flight.
    """

    def __init__(self) -> None:
        self.number = 0

    def sees(self, number: int) -> bool:
        """Whether to record the state now, before what carries this number is handled."""
        if number <= self.number:
            return False
        self.number = number
        return True
