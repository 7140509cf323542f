"""One actor after another: each goes on until it needs what another has yet to make."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator

from ddiloco.disk.tape.file import TapeError
from ddiloco.replay.plan import Actor, Key, Plan, Work

Perform = Callable[[Actor, Work], None]


class Uses:
    """How often each thing is still needed, so that nothing is kept longer."""

    def __init__(self, actors: Iterable[Actor]) -> None:
        self._left = collections.Counter(key for a in actors for w in a.works for key in w.needs)

    def done(self, work: Work) -> Iterator[Key]:
        """Counts what a work needed; gives what nobody needs any more."""
        for key in work.needs:
            self._left[key] -= 1
            if not self._left[key]:
                yield key

    def wanted(self, key: Key) -> bool:
        """Whether anybody will need it."""
        return self._left[key] > 0


def perform(plan: Plan, do: Perform, over: Callable[[], bool] = lambda: False) -> list[str]:
    """Does all works in an order in which each finds what it needs; the same plan gives the same order.

    Args:
      plan: what is to be done.
      do: does one work of an actor.
      over: asked after each; ends it early.

    Returns:
      What keeps the actors that could not go on, a line each; [] where all was done or it was ended early.
    """
    there = plan.given
    at = [0] * len(plan.actors)
    moved = True
    while moved:
        moved = False
        for n, actor in enumerate(plan.actors):
            while at[n] < len(actor.works) and there.issuperset(actor.works[at[n]].needs):
                work = actor.works[at[n]]
                do(actor, work)
                at[n] += 1
                moved = True
                if work.makes is not None:
                    there.add(work.makes)
                if over():
                    return []
    return [
        f"{actor.name} needs {next(key for key in actor.works[i].needs if key not in there)}"
        for actor, i in zip(plan.actors, at, strict=True)
        if i < len(actor.works)
    ]


def perform_all(plan: Plan, do: Perform, over: Callable[[], bool] = lambda: False) -> None:
    """Like `perform`.

    Raises:
      TapeError: an actor needs what no tape makes.
    """
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
        folder = plan.syncer.tapes[0].path.parent
        raise TapeError(f"{folder}: {next(missing, stuck[0])}; a tape is missing or was cut")
