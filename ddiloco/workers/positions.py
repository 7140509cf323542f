"""Data positions of learners, from the watermarks of durable rounds of another number of learners."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from ddiloco.data import shards
from ddiloco.data.errors import DataError
from ddiloco.protocol.messages import NOTHING_MERGED, Watermark
from ddiloco.protocol.state import SyncerState, Watermarks
from ddiloco.settings.experiment import Experiment
from ddiloco.telemetry import records

MAX_SHARDS = 1 << 20  # that an earlier run is believed to have had


def with_positions(state: SyncerState, positions: Mapping[int, str]) -> SyncerState:
    """The state with these data positions of these learners, in all fragments."""

    def placed(known: Watermarks) -> dict[int, Watermark]:
        marks = {m: known.get(m, NOTHING_MERGED) for m in positions}
        return {**known, **{m: dataclasses.replace(mark, position=positions[m]) for m, mark in marks.items()}}

    return dataclasses.replace(state, watermarks=tuple(map(placed, state.watermarks)))


def resharded(state: SyncerState, experiment: Experiment) -> SyncerState:
    """The state with data divided anew among this run's learners, if all positions are of other shards.

    The next version of any fragment has all of them: positions of other shards are void then.

    Raises:
      DataError: there are others, and one learner's position is invalid.
    """
    ours: dict[int, Watermark] = {}
    for m, mark in ((m, mark) for known in state.watermarks for m, mark in known.items()):
        if _shards(_position(mark)) == experiment.num_data_shards:
            ours[m] = Watermark.furthest([mark, ours.get(m, mark)])
    if ours:
        return with_positions(state, {m: mark.position for m, mark in ours.items()})
    learners = sorted({m for known in state.watermarks for m in known})
    found = [_position(state.furthest(m)) for m in learners]
    states = [at for at in found if _shards(at)]
    if not states:
        return state
    groups = [experiment.data_shards((m,)) for m in range(experiment.max_learners)]
    new = enumerate(shards.reshard(states, experiment.num_data_shards, groups))
    return with_positions(state, {m: "" if at is None else json.dumps(at) for m, at in new})


def reshard_or_reset(
    state: SyncerState, experiment: Experiment, record: Callable[[Any], None]
) -> SyncerState:
    """As `resharded`; if that fails, learners read their data from the start, with an alarm."""
    try:
        return resharded(state, experiment)
    except DataError as error:
        problem = f"{error}: rejoining learners start their data over"
        record(records.Alarm(problem, time.time()))
        return with_positions(state, dict.fromkeys(range(experiment.max_learners), ""))


def _position(mark: Watermark) -> dict[str, Any]:
    """A learner's data position; empty if it cannot be read."""
    try:
        return dict(json.loads(mark.position)) if mark.position else {}
    except (ValueError, TypeError, RecursionError):
        return {}


def _shards(position: Mapping[str, Any]) -> int:
    """Number of shards of a position; 0: none that is possible."""
    try:
        found = int(position["stream"]["num_shards"])
    except (ValueError, TypeError, LookupError, OverflowError):
        return 0
    return found if 0 < found <= MAX_SHARDS else 0
