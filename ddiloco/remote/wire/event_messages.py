"""Events of the protocol as messages of the wire, and back; `agreement.parse` has looked at the numbers.

A message has the fields of its event, by the same names. Whose it is the connection says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.agreement import WireError

LONGEST_REASON = 500

LearnerToSyncer = events.LearnerJoined | events.LearnerReady | events.LearnerLost | events.StepReported
SyncerNotice = events.ClockSet | events.NotMember | events.Rejected

_LEARNERS = {"join": events.LearnerJoined, "ready": events.LearnerReady, "lost": events.LearnerLost}
_SYNCERS = {"clock_set": events.ClockSet, "not_member": events.NotMember, "rejected": events.Rejected}


def from_learner(event: LearnerToSyncer) -> pb.FromLearner:
    """The message of an event that a learner tells its syncer."""
    if isinstance(event, events.StepReported):
        r = event.report
        report = {
            "incarnation": r.incarnation,
            "step": r.step,
            "versions": [c.version for c in r.counters],
            "steps": [c.steps for c in r.counters],
            "tokens": [c.tokens for c in r.counters],
        }
        return pb.FromLearner(report=report)
    return pb.FromLearner(**_told(event, _LEARNERS))


def learner_event(message: pb.FromLearner, learner: int, num_fragments: int) -> LearnerToSyncer:
    """The event that a learner tells.

    Raises:
      WireError: the message is no event, or of another number of fragments.
    """
    match message.WhichOneof("kind"):
        case "join" if not message.join.HasField("step"):
            return events.LearnerJoined(learner, message.join.incarnation)
        case "join" | "ready" as kind:
            m = getattr(message, kind)
            versions = by_fragment(m.versions, num_fragments)
            return _LEARNERS[kind](learner, m.incarnation, m.step, versions)
        case "report":
            m = message.report
            columns = (by_fragment(column, num_fragments) for column in (m.versions, m.steps, m.tokens))
            counters = tuple(FragmentCounters(*row) for row in zip(*columns, strict=True))
            return events.StepReported(Report(learner, m.incarnation, m.step, counters))
        case "lost":
            return events.LearnerLost(learner, **_fields(message.lost))
        case kind:
            raise WireError("unexpected message", f"{kind or 'an empty one'} where an event must be")


def from_syncer(event: SyncerNotice) -> pb.ToLearner:
    """The message of an event without arrays that the syncer tells a learner."""
    return pb.ToLearner(**_told(event, _SYNCERS))


def syncer_event(message: pb.ToLearner) -> SyncerNotice:
    """The event without arrays that the syncer tells; raises WireError if the message is none."""
    kind = message.WhichOneof("kind")
    if kind not in _SYNCERS:
        raise WireError("unexpected message", f"{kind or 'an empty one'} where an event must be")
    return _SYNCERS[kind](**_fields(getattr(message, kind)))


def up_header(pull: int, contribution: Contribution, size: int) -> pb.UpHeader:
    """What stands before the chunks of a contribution of `size` bytes."""
    told = dataclasses.asdict(contribution)
    del told["learner"]
    return pb.UpHeader(pull=pull, size=size, **told)


def contribution_of(header: pb.UpHeader, learner: int, fragment: int) -> Contribution:
    """The contribution that a header announces, which must be of this fragment, else raises WireError."""
    if header.fragment != fragment:
        raise WireError("another fragment", f"{header.fragment} came where {fragment} was asked for")
    told = _fields(header)
    del told["pull"], told["size"]
    return Contribution(learner, **told)


def check_down_header(header: pb.DownHeader, num_fragments: int) -> None:
    """Sees that the header of an update is of one of this model's fragments, else raises WireError."""
    if header.fragment >= num_fragments:
        raise WireError("another fragment", f"{header.fragment} of {num_fragments}")


def by_fragment(values: Sequence[int], num_fragments: int) -> tuple[int, ...]:
    """The numbers, one a fragment; raises WireError if there are more or fewer."""
    if len(values) != num_fragments:
        raise WireError("another number of fragments", f"{len(values)} where there are {num_fragments}")
    return tuple(values)


def _told(event: Any, kinds: dict[str, type]) -> dict[str, dict[str, Any]]:
    """The event's fields, under the name of its kind of message."""
    kind = next(name for name, of_event in kinds.items() if isinstance(event, of_event))
    told = {name: value for name, value in dataclasses.asdict(event).items() if name != "learner"}
    if "reason" in told:
        told["reason"] = told["reason"][:LONGEST_REASON]
    return {kind: told}


def _fields(message: Message) -> dict[str, Any]:
    told = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    if "reason" in told:
        told["reason"] = told["reason"][:LONGEST_REASON]
    return told
