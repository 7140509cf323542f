"""Events of the protocol as messages of the wire, and back; `agreement.parse` has looked at the numbers.

A message has the fields of its event, by the same names. Whose it is the connection says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.agreement import WireError
from ddiloco.schema import codec

LONGEST_REASON = 500

R = TypeVar("R")

SyncerNotice = events.ClockSet | events.NotMember | events.Rejected


def from_learner(event: events.FromLearner) -> pb.FromLearner:
    """The message of an event that a learner tells its syncer; whose it is, the connection says."""
    return pb.FromLearner(event=codec.message_of(_short(event)))


def learner_event(message: pb.FromLearner, learner: int, num_fragments: int) -> events.FromLearner:
    """The event that a learner tells; it is the learner's, whatever it says.

    Raises:
      WireError: the message is no event, or of another number of fragments.
    """
    m = message.event
    match m.WhichOneof("kind"):
        case "learner_joined":
            rows = m.learner_joined.versions if m.learner_joined.HasField("step") else None
        case "learner_ready":
            rows = m.learner_ready.versions
        case "step_reported":
            rows = m.step_reported.report.counters
        case "learner_lost":
            rows = None
        case _:
            raise _unexpected(message)
    if rows is not None:
        by_fragment(rows, num_fragments)
    event = _short(codec.event_of(m))
    if isinstance(event, events.StepReported):
        return events.StepReported(dataclasses.replace(event.report, learner=learner))
    return dataclasses.replace(event, learner=learner)


def from_syncer(event: SyncerNotice) -> pb.ToLearner:
    """The message of an event without arrays that the syncer tells a learner."""
    return pb.ToLearner(event=codec.message_of(_short(event)))


def syncer_event(message: pb.ToLearner) -> SyncerNotice:
    """The event without arrays that the syncer tells.

    Raises:
      WireError: the message is no such event, or has numbers that cannot be.
    """
    if message.event.WhichOneof("kind") not in ("clock_set", "not_member", "rejected"):
        raise _unexpected(message)
    return _short(codec.event_of(message.event))


def up_header(pull: int, contribution: Contribution, size: int) -> pb.UpHeader:
    """What stands before the chunks of a contribution of `size` bytes."""
    return pb.UpHeader(pull=pull, contribution=dataclasses.asdict(contribution), size=size)


def contribution_of(header: pb.UpHeader, learner: int, fragment: int) -> Contribution:
    """The contribution that a header announces, which must be of this fragment; it is the learner's.

    Raises:
      WireError: it is of another, or has numbers that cannot be.
    """
    contribution: Contribution = codec.read(header.contribution)
    if contribution.fragment != fragment:
        raise WireError("another fragment", f"{contribution.fragment} came where {fragment} was asked for")
    return dataclasses.replace(contribution, learner=learner)


def update_of(header: pb.DownHeader, num_fragments: int) -> events.UpdateArrived:
    """The update that a header announces.

    Raises:
      WireError: it cannot be one of this model.
    """
    update: events.UpdateArrived = codec.read(header.update)
    if update.fragment >= num_fragments:
        raise WireError("another fragment", f"{update.fragment} of {num_fragments}")
    return update


def by_fragment(rows: Sequence[R], num_fragments: int) -> Sequence[R]:
    """The rows, one a fragment; raises WireError if there are more or fewer."""
    if len(rows) != num_fragments:
        raise WireError("another number of fragments", f"{len(rows)} where there are {num_fragments}")
    return rows


def _short(event: Any) -> Any:
    """The event with no more of its reason, where it has one, than travels."""
    if isinstance(event, events.LearnerLost | events.Rejected):
        return dataclasses.replace(event, reason=event.reason[:LONGEST_REASON])
    return event


def _unexpected(message: pb.FromLearner | pb.ToLearner) -> WireError:
    kind = message.event.WhichOneof("kind") or message.WhichOneof("kind") or "an empty one"
    return WireError("unexpected message", f"{kind} where an event must be")
