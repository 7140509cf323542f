"""The vector clocks in a snapshot's header, and the check that they form a consistent cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ddiloco.config import build
from ddiloco.protocol.clocks import VectorClock, is_consistent_cut


@dataclasses.dataclass(frozen=True)
class Clocks:
    """The entry `clocks` of a header: the syncer's clock, and the recorded learners' by number."""

    syncer: VectorClock
    learners: Mapping[int, VectorClock]


def check_cut(header: Mapping[str, Any]) -> None:
    """Checks that the states in a snapshot are a consistent cut; a header without `clocks` is of one state.

    Raises:
      ValueError: they are not.
    """
    if "clocks" not in header:
        return
    clocks = build(Clocks, header["clocks"], "clocks")
    if not is_consistent_cut(clocks.syncer, clocks.learners):
        raise ValueError("is no consistent cut: a state in it holds work that its owner has yet to do")
