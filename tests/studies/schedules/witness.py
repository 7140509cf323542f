"""Remembers what happened in a virtual fleet, for a test to ask about."""

from __future__ import annotations

from collections.abc import Iterable

from ddiloco.goodput.accounting import State
from ddiloco.protocol import actions
from ddiloco.virtual.array_ports import Observer
from ddiloco.virtual.fleet import Fleet

WAITING = (State.WAITING_FOR_PEERS, State.WAITING_FOR_NETWORK)


class Witness(Observer):
    """Merges with their times, drops, and the learners that ever waited."""

    def __init__(self) -> None:
        self.merges: list[actions.Merge] = []
        self.merge_times: list[float] = []
        self.drops: list[str] = []  # their reasons
        self.waited: set[int] = set()

    def merged(self, merge, left_out, now):
        self.merges.append(merge)
        self.merge_times.append(now)

    def noted(self, name, values, now):
        if name == "drop":
            self.drops.append(values["reason"])

    def entered(self, learner, state, chips, now):
        if state in WAITING:
            self.waited.add(learner)

    def rounds(self):
        """(step, fragment) of each merge, in their order."""
        return [(merge.round.step, merge.round.fragment) for merge in self.merges]


def join_all(fleet: Fleet, at: Iterable[float]) -> None:
    """Lets the learners 0, 1, 2 ... join at these times."""
    for learner, time in enumerate(at):
        fleet.calendar.at(time, fleet.join, learner)
