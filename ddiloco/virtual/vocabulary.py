"""What a virtual fleet consists of, as far as it is state: the classes that a recording knows."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable

from ddiloco.goodput.accounting import State
from ddiloco.protocol import (
    actions,
    attendance,
    estimates,
    events,
    membership,
    messages,
    rounds,
    schedule,
    state,
)
from ddiloco.protocol import learner as learner_core
from ddiloco.protocol import syncer as syncer_core
from ddiloco.roles.arrivals import Arrivals
from ddiloco.virtual import durations, links, lives
from ddiloco.virtual import learner_process as learner
from ddiloco.virtual import syncer_process as syncer
from ddiloco.virtual.graph import Vocabulary

_OWNERS = {
    learner_core.LearnerCore: (),
    syncer_core.SyncerCore: (),
    attendance.Attendance: (),
    membership.Membership: (),
    Arrivals: (),
    durations.Varying: (),
    links.Link: (),
    learner.Place: ("down",),  # on which the syncer sends
    learner.VirtualLearner: ("place", "arrays", "_calendar", "_observer", "_send"),
    syncer.VirtualSyncer: (
        "_policy",
        "_total_steps",
        "arrays",
        "_calendar",
        "_observer",
        "_deliver",
        "_pull",
    ),
}
_MODULES = (
    *(actions, estimates, events, learner_core, membership, messages, rounds, schedule, state),
    *(durations, learner, links, lives),
)


def vocabulary(payloads: Iterable[type] = ()) -> Vocabulary:
    """The classes of a fleet, and those of what travels in it: `payloads`, dataclasses."""
    values = [
        thing
        for module in _MODULES
        for thing in vars(module).values()
        if _is_value(thing) and thing.__module__ == module.__name__ and thing not in _OWNERS
    ]
    return Vocabulary([State, *values, *payloads], _OWNERS)


def _is_value(thing: object) -> bool:
    return isinstance(thing, type) and (dataclasses.is_dataclass(thing) or issubclass(thing, enum.Enum))
