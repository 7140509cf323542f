"""Messages between learner and syncer workers: offers, deliveries."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ddiloco.protocol import events
from ddiloco.protocol.state import Watermarks
from ddiloco.storage.learner_state import LearnerState
from ddiloco.storage.tape.entries import InnerOrigin

Pieces = Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class EventDelivery:
    """An event for a learner, with the pieces of the fragments that `fragments_with` names."""

    event: events.FromSyncer
    fragments: Sequence[Pieces] = ()
    watermarks: Mapping[int, Watermarks] = dataclasses.field(default_factory=dict)  # by fragment
    # Of an UpdateArrived: the encoded difference from the previous version, which can be sent in place of the
    # pieces to learners that have that version; (): none.
    difference: Pieces = ()
    statements: Sequence[bytes] = ()  # the shard's signed ones on the fragments; (): none, without receipts


def fragments_with(event: events.FromSyncer) -> Sequence[int]:
    """The fragments that travel with an event from the syncer to a learner."""
    match event:
        case events.Welcomed(versions=versions, fragments=fragments):
            return fragments or range(len(versions))
        case events.UpdateArrived(fragment=fragment):
            return (fragment,)
    return ()


@dataclasses.dataclass(frozen=True)
class InnerState:
    """A learner's inner optimizer state at one step boundary."""

    step: int  # the learner's clock there
    versions: tuple[int, ...]  # by fragment, those that it had applied
    arrays: Sequence[np.ndarray | jax.Array]  # one for each of `Program.inner_leaves`
    origin: InnerOrigin | None = None  # its name on the donor's tape; None: not known
    trained: int = 0  # inner steps since it was fresh, of whichever learners


@dataclasses.dataclass(frozen=True)
class InnerStateWanted:
    """Asks for the learner's inner state, once it has applied at least these versions."""

    versions: tuple[int, ...]  # by fragment; (): at once
    answer: concurrent.futures.Future[InnerState]  # cancelled when it is no longer wanted


@dataclasses.dataclass(frozen=True)
class BetweenSteps:
    """A call that the learner's thread makes between two steps, since it needs the devices to itself."""

    call: Callable[[], Any]
    answer: concurrent.futures.Future[Any]  # cancelled when it is no longer wanted

    def make(self) -> None:
        """Makes the call, and answers with its result or exception."""
        if self.answer.set_running_or_notify_cancel():
            try:
                self.answer.set_result(self.call())
            except Exception as error:
                self.answer.set_exception(error)


@dataclasses.dataclass(frozen=True)
class CheckpointAsked:
    """The syncer takes a snapshot: the learner should write a checkpoint under its number."""

    number: int


@dataclasses.dataclass(frozen=True)
class CheckpointWritten:
    """A learner's answer to a request for a checkpoint: it is durable, or a problem."""

    learner: int
    number: int  # of the snapshot
    versions: tuple[int, ...] = ()  # by fragment, those in it
    problem: str = ""

    @classmethod
    def of(cls, learner: int, number: int, result: LearnerState | str) -> CheckpointWritten:
        """From the result of a write, or its problem."""
        if isinstance(result, str):
            return cls(learner, number, problem=result)
        return cls(learner, number, tuple(fragment.version for fragment in result.header.work.fragments))


@dataclasses.dataclass(frozen=True)
class Leave:
    """The run is over, or this process is to end; `comes_back`: its devices stay the learner's."""

    comes_back: bool = False


Delivery = EventDelivery | InnerStateWanted | BetweenSteps | CheckpointAsked | Leave
