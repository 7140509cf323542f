"""Fragments that have come for rounds in flight, kept until their merge takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Contribution, RoundId

Arrays = TypeVar("Arrays")


class Arrivals(Generic[Arrays]):
    """What the syncer's core has accepted: one entry a round and learner. Used by one thread."""

    def __init__(self) -> None:
        self._kept: dict[tuple[RoundId, int], Arrays] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(
        self, event: events.FragmentArrived, decided: Sequence[actions.SyncerAction], arrays: Arrays
    ) -> None:
        """Keeps the arrays of a fragment, unless the core dropped this very one."""
        key = (event.round, event.contribution.learner)
        dropped = [(a.round, a.learner) for a in decided if isinstance(a, actions.Drop)]
        if key not in dropped:  # the core may hold an accepted one of the same learner
            self._kept[key] = arrays

    def take(self, merge: actions.Merge) -> list[tuple[Contribution, Arrays]]:
        """The contributions of a merge with their arrays, which are kept no longer."""
        return [(c, self._kept.pop((merge.round, c.learner))) for c in merge.contributions]

    def forget(self, record: actions.Record) -> None:
        """Lets go of what came for a round that was abandoned; other records change nothing."""
        if record.name == "round_abandoned":
            abandoned = RoundId(record.values["step"], record.values["fragment"])
            self._kept = {key: arrays for key, arrays in self._kept.items() if key[0] != abandoned}
