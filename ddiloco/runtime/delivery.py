"""What the syncer hands to a learner: protocol events with their arrays, or the word to leave."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ddiloco.protocol import events

Pieces = Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class WelcomeDelivery:
    """A welcome, with the pieces of every fragment."""

    event: events.Welcomed
    fragments: Sequence[Pieces]


@dataclasses.dataclass(frozen=True)
class Notice:
    """What needs no arrays: a global step that has come, or how the syncer sees the learner."""

    event: events.ClockSet | events.NotMember | events.Rejected


@dataclasses.dataclass(frozen=True)
class UpdateDelivery:
    """An update, with the pieces of its fragment."""

    event: events.UpdateArrived
    pieces: Pieces


@dataclasses.dataclass(frozen=True)
class Leave:
    """The run is over."""


Delivery = WelcomeDelivery | Notice | UpdateDelivery | Leave
