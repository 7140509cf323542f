"""The order of a replay: each actor works until it needs something that another has not made yet."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator

from ddiloco.storage.tape.file import TapeError
from experiments.studies.replay.works import Actor, Key, ReplayPlan, ReplayWork

Perform = Callable[[Actor, ReplayWork], None]


class Uses:
    """Counts how often each thing is still needed, so that nothing is kept longer."""

    def __init__(self, actors: Iterable[Actor]) -> None:
        self._left = collections.Counter(key for a in actors for w in a.works for key in w.needs)

    def done(self, work: ReplayWork) -> Iterator[Key]:
        """Counts what a finished work needed; gives what is no longer needed."""
        for key in work.needs:
            self._left[key] -= 1
            if not self._left[key]:
                yield key

    def wanted(self, key: Key) -> bool:
        """Whether it will be needed."""
        return self._left[key] > 0


def perform(plan: ReplayPlan, do: Perform, over: Callable[[], bool] = lambda: False) -> list[str]:
    """Does all works, each after what it needs has been made; the same plan always gives the same order.

    `over` is called after each work; True ends the replay early.

    Returns:
      For each actor that got stuck, a line that says what it needs; [] if all was done or `over` was True.
    """
    made = plan.given
    at = [0] * len(plan.actors)
    moved = True
    while moved:
        moved = False
        for n, actor in enumerate(plan.actors):
            while at[n] < len(actor.works) and made.issuperset(actor.works[at[n]].needs):
                work = actor.works[at[n]]
                do(actor, work)
                at[n] += 1
                moved = True
                if work.makes is not None:
                    made.add(work.makes)
                if over():
                    return []
    return [
        f"{actor.name} needs {next(key for key in actor.works[i].needs if key not in made)}"
        for actor, i in zip(plan.actors, at, strict=True)
        if i < len(actor.works)
    ]


def perform_all(plan: ReplayPlan, do: Perform, over: Callable[[], bool] = lambda: False) -> None:
    """Like `perform`; raises TapeError if an actor needs something that is on no tape."""
    stuck = perform(plan, do, over)
    if stuck:
        made = {work.makes for actor in plan.actors for work in actor.works} | plan.given
        missing = (
            f"{actor.name} needs {key}, which is on no tape"
            for actor in plan.actors
            for work in actor.works
            for key in work.needs
            if key not in made
        )
        folder = plan.first.path.parent
        raise TapeError(f"{folder}: {next(missing, stuck[0])}; a tape is missing or was cut")
