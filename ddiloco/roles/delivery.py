"""What is handed to a learner: protocol events with their arrays, a peer's wish, or the word to leave."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from ddiloco.disk.tape.entries import InnerOrigin
from ddiloco.protocol import events

Pieces = Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Told:
    """An event, with the pieces of the fragments that `fragments_with` names."""

    event: events.FromSyncer
    fragments: Sequence[Pieces] = ()
    epoch: int = 0  # snapshot after whose cut it was sent; 0: the channel keeps the order, or there is none


def fragments_with(event: events.FromSyncer) -> Sequence[int]:
    """The fragments that travel with what the syncer tells a learner."""
    match event:
        case events.Welcomed(versions=versions):
            return range(len(versions))
        case events.UpdateArrived(fragment=fragment):
            return (fragment,)
    return ()


@dataclasses.dataclass(frozen=True)
class InnerState:
    """A learner's inner optimizer state at one step boundary.

    Attributes:
      step: the learner's clock there.
      versions: by fragment, those that it had applied.
      arrays: one for each of `TrainProgram.inner_leaves`.
      origin: under which the tape of the learner that gave it notes it; None: not known.
    """

    step: int
    versions: tuple[int, ...]
    arrays: Sequence[np.ndarray | jax.Array]
    origin: InnerOrigin | None = None


@dataclasses.dataclass(frozen=True)
class InnerStateWanted:
    """Somebody wants the learner's inner state at a boundary at which these versions at least are applied."""

    versions: tuple[int, ...]  # by fragment; (): of any boundary
    answer: concurrent.futures.Future[InnerState]  # cancelled once nobody waits


@dataclasses.dataclass(frozen=True)
class SnapshotBegun:
    """The syncer has recorded its state for this snapshot: the learner is to record its own.

    Attributes:
      number: of the snapshot.
      versions: by fragment, those in the syncer's state; an update to a later one was sent after the cut.
    """

    number: int
    versions: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Leave:
    """The run is over."""


Delivery = Told | InnerStateWanted | SnapshotBegun | Leave
