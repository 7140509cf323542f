"""The vector clocks in a snapshot's header, and the check that they form a consistent cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddiloco.protocol.clocks import VectorClock, is_consistent_cut


def clock_to_json(clock: VectorClock) -> dict[str, Any]:
    """The clock as JSON values; `clock_from_json` gives an equal one."""
    return {
        "learners": {str(m): list(at) for m, at in clock.learners.items()},
        "versions": {str(p): version for p, version in clock.versions.items()},
    }


def clock_from_json(values: Mapping[str, Any]) -> VectorClock:
    """The clock from what `clock_to_json` gave.

    Raises:
      ValueError: it is something else.
    """
    try:
        return VectorClock(
            {int(m): (int(number), int(step)) for m, (number, step) in values["learners"].items()},
            {int(p): int(version) for p, version in values["versions"].items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError("holds a vector clock that is none") from None


def clocks_to_json(syncer: VectorClock, learners: Mapping[int, VectorClock]) -> dict[str, Any]:
    """The entry `clocks` of a header: the syncer's clock, and the recorded learners' by number."""
    by_learner = {str(m): clock_to_json(clock) for m, clock in learners.items()}
    return {"syncer": clock_to_json(syncer), "learners": by_learner}


def check_cut(header: Mapping[str, Any]) -> None:
    """Checks that the states in a snapshot are a consistent cut; a header without `clocks` is of one state.

    Raises:
      ValueError: they are not.
    """
    if "clocks" not in header:
        return
    clocks = header["clocks"]
    try:
        syncer = clock_from_json(clocks["syncer"])
        learners = {int(m): clock_from_json(clock) for m, clock in clocks["learners"].items()}
    except (AttributeError, KeyError, TypeError):
        raise ValueError("holds vector clocks that are none") from None
    if not is_consistent_cut(syncer, learners):
        raise ValueError("is no consistent cut: a state in it holds work that its owner has yet to do")
