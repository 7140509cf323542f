"""The vector clocks in a snapshot's header, and that they could be of one moment."""

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


def clock_from_json(told: Mapping[str, Any]) -> VectorClock:
    """The clock that `clock_to_json` told.

    Raises:
      ValueError: it is none.
    """
    try:
        return VectorClock(
            {int(m): (int(number), int(step)) for m, (number, step) in told["learners"].items()},
            {int(p): int(version) for p, version in told["versions"].items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError("holds a vector clock that is none") from None


def clocks_to_json(syncer: VectorClock, learners: Mapping[int, VectorClock]) -> dict[str, Any]:
    """The entry `clocks` of a header: the syncer's clock, and by number those of the learners recorded."""
    told = {str(m): clock_to_json(clock) for m, clock in learners.items()}
    return {"syncer": clock_to_json(syncer), "learners": told}


def check_cut(header: Mapping[str, Any]) -> None:
    """Sees that the states a header tells of could be those of one moment; without `clocks` it is one state.

    Raises:
      ValueError: they could not.
    """
    if "clocks" not in header:
        return
    clocks = header["clocks"]
    try:
        syncer = clock_from_json(clocks["syncer"])
        learners = {int(m): clock_from_json(told) for m, told in clocks["learners"].items()}
    except (AttributeError, KeyError, TypeError):
        raise ValueError("holds vector clocks that are none") from None
    if not is_consistent_cut(syncer, learners):
        raise ValueError("is no consistent cut: a state in it holds work that its owner has yet to do")
