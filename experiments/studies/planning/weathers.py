"""Twelve fleets in virtual time, of which half change half-way, for controllers of a run's timing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ddiloco.settings.experiment import Experiment
from ddiloco.virtual.fleet import Fleet

LEARNERS = 6
WIDE = 20.0  # times the need: bytes that a learner sends a step in float32 with H = 24


@dataclasses.dataclass(frozen=True)
class Weather:
    """Links, merges and steps of a fleet.

    Attributes:
      links: what each link carries, in the need; of one learner, or of all alike.
      merge_seconds: of a merge.
      change: what happens half-way to the fleet, given the need in bytes a second; None: nothing.
    """

    links: tuple[float, ...] = (WIDE,)
    merge_seconds: float = 0.1
    change: Callable[[Fleet, float], None] | None = None

    def settings(self, need: float) -> dict[str, Any]:
        """Of `config.virtual`."""
        return {
            "bandwidth": tuple(share * need for share in self.links),
            "merge_seconds": self.merge_seconds,
            "step_variation": 0.1,
        }

    def of(self, experiment: Experiment, need: float) -> Experiment:
        """The experiment in this weather, before it changes."""
        virtual = dataclasses.replace(experiment.virtual, **self.settings(need))
        return dataclasses.replace(experiment, virtual=virtual)


def _links(share: float, learners: Iterable[int] = range(LEARNERS)) -> Callable[[Fleet, float], None]:
    def change(fleet: Fleet, need: float) -> None:
        for m in learners:
            for link in (fleet.places[m].up, fleet.places[m].down):
                link.quality = dataclasses.replace(link.quality, bandwidth=share * need)

    return change


def _lost(fleet: Fleet, need: float) -> None:
    for m in range(LEARNERS // 3):
        fleet.fail(m)


def _slow_merges(fleet: Fleet, need: float) -> None:
    fleet.takes = dataclasses.replace(fleet.takes, merge=lambda: 2.5)


def _half_speed(fleet: Fleet, need: float) -> None:
    for m in range(LEARNERS // 3):
        fleet.places[m].share = 0.5
        fleet.processes[m].resume(0.5)


ONE_THIN = (0.15, *(WIDE,) * (LEARNERS - 1))
WEATHERS: Mapping[str, Weather] = {
    "wide links": Weather(),
    "links of the need": Weather((1.0,)),
    "links of half the need": Weather((0.5,)),
    "links of a quarter": Weather((0.25,)),
    "a merge takes 1.5 s": Weather(merge_seconds=1.5),
    "one thin link of six": Weather(ONE_THIN),
    "links become a hundredth": Weather(change=_links(WIDE / 100)),
    "links become a hundredfold": Weather((WIDE / 100,), change=_links(WIDE)),
    "a third of the learners is lost": Weather((1.0,), change=_lost),
    "merges take 2.5 s, not 0.1": Weather(change=_slow_merges),
    "a third steps at half speed": Weather((1.0,), change=_half_speed),
    "one link of six becomes thin": Weather(change=_links(0.15, (0,))),
}
