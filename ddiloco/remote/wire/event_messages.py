"""Events of the protocol as messages of the wire, and back; `agreement.parse` has checked the numbers.

A message has the fields of its event, by the same names, but not the learner: that is the connection's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from ddiloco.protocol import events
from ddiloco.protocol.messages import NO_RECEIPT, Contribution, OfferReceipt, Report, RoundId
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.validation import WireError
from ddiloco.schema import codec

MAX_REASON_LENGTH = 500
MAX_POSITION_LENGTH = 768 << 10  # characters

R = TypeVar("R")

SyncerNotice = events.ClockSet | events.TimingSet | events.OfferAsked | events.NotMember | events.Rejected

_NOTICES = ("clock_set", "timing_set", "offer_asked", "not_member", "rejected")


def from_learner(
    event: events.FromLearner | events.OfferFailed, before: Report | None = None
) -> pb.FromLearner:
    """The message of a learner's event, without the learner's number.

    `before`: the last report on this connection, from which a report has the changes; None: the first.
    """
    return pb.FromLearner(event=codec.message_of(_short(event), before))


def learner_event(
    message: pb.FromLearner, learner: int, num_fragments: int, before: Report | None = None
) -> events.SyncerEvent:
    """The event in a message from this learner to a shard that has so many fragments.

    `before`: as in `from_learner`.

    Raises:
      WireError: the message is not an event, or has another number of fragments.
    """
    m = message.event
    match m.WhichOneof("kind"):
        case "step_reported":
            m.step_reported.report.learner = learner
            try:
                report = codec.report_of(m.step_reported.report, before)
            except ValueError as error:
                raise WireError("malformed report", str(error)) from None
            by_fragment(report.bases, num_fragments)
            return events.StepReported(report)
        case "learner_joined":
            rows = m.learner_joined.versions if m.learner_joined.HasField("step") else None
        case "learner_ready":
            rows = m.learner_ready.versions
        case "learner_lost" | "offer_failed":
            rows = None
        case _:
            raise _unexpected(message)
    if rows is not None:
        by_fragment(rows, num_fragments)
    return dataclasses.replace(_short(codec.told_by(m)), learner=learner)


def from_syncer(event: SyncerNotice) -> pb.ToLearner:
    """The message of an event without arrays from the syncer."""
    return pb.ToLearner(event=codec.message_of(_short(event)))


def syncer_event(message: pb.ToLearner) -> SyncerNotice:
    """The event without arrays in a message from the syncer.

    Raises:
      WireError: the message is not such an event, or has impossible numbers.
    """
    if message.event.WhichOneof("kind") not in _NOTICES:
        raise _unexpected(message)
    return _short(codec.told_by(message.event))


def up_header(
    round_id: RoundId, contribution: Contribution, size: int, receipt: OfferReceipt = NO_RECEIPT
) -> pb.UpHeader:
    """The header of a contribution of `size` bytes to a round."""
    fields = codec.fields_of(events.FragmentArrived(round_id, contribution, receipt))
    return pb.UpHeader(**fields, size=size)


def offer_of(header: pb.UpHeader, learner: int, num_fragments: int) -> events.FragmentArrived:
    """The contribution in a header.

    Raises:
      WireError: it is of another fragment than the round, or has impossible numbers.
    """
    round_id: RoundId = codec.read(header.round)
    contribution: Contribution = codec.read(header.contribution)
    if len(contribution.upto.position) > MAX_POSITION_LENGTH:
        raise WireError("malformed position", f"of {len(contribution.upto.position)} characters")
    if contribution.fragment != round_id.fragment or round_id.fragment >= num_fragments:
        raise WireError("another fragment", f"{contribution.fragment} for {round_id} of {num_fragments}")
    contribution = dataclasses.replace(contribution, learner=learner)
    return events.FragmentArrived(round_id, contribution, codec.read(header.receipt))


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
    """The rows, one for each fragment; raises WireError if there are more or fewer."""
    if len(rows) != num_fragments:
        raise WireError("another number of fragments", f"{len(rows)} where there are {num_fragments}")
    return rows


def _short(event: Any) -> Any:
    """The event, its reason (if any) cut to the length that is sent."""
    if isinstance(event, events.LearnerLost | events.OfferFailed | events.Rejected | events.TimingSet):
        return dataclasses.replace(event, reason=event.reason[:MAX_REASON_LENGTH])
    return event


def _unexpected(message: pb.FromLearner | pb.ToLearner) -> WireError:
    kind = message.event.WhichOneof("kind") or message.WhichOneof("kind") or "an empty one"
    return WireError("unexpected message", f"{kind} where an event must be")
