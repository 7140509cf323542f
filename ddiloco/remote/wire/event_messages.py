"""Events of the protocol as messages of the wire, and back; what comes off the wire is checked for shape."""

from __future__ import annotations

from collections.abc import Sequence

from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.agreement import WireError

LARGEST = 1 << 53  # of any number on the wire; counters that a float64 cannot hold are nonsense
LONGEST_REASON = 500

LearnerToSyncer = events.LearnerJoined | events.LearnerReady | events.LearnerLost | events.StepReported
SyncerNotice = events.ClockSet | events.NotMember | events.Rejected


def from_learner(event: LearnerToSyncer) -> pb.FromLearner:
    """The message of an event that a learner tells its syncer; whose it is, the connection says."""
    match event:
        case events.LearnerJoined():
            join = pb.Join(incarnation=event.incarnation, step=event.step, versions=event.versions or ())
            return pb.FromLearner(join=join)
        case events.LearnerReady():
            ready = pb.Ready(incarnation=event.incarnation, step=event.step, versions=event.versions)
            return pb.FromLearner(ready=ready)
        case events.StepReported(report=r):
            report = pb.Report(
                incarnation=r.incarnation,
                step=r.step,
                versions=[c.version for c in r.counters],
                steps=[c.steps for c in r.counters],
                tokens=[c.tokens for c in r.counters],
            )
            return pb.FromLearner(report=report)
        case events.LearnerLost():
            return pb.FromLearner(
                lost=pb.Lost(incarnation=event.incarnation, reason=event.reason[:LONGEST_REASON])
            )


def learner_event(message: pb.FromLearner, learner: int, num_fragments: int) -> LearnerToSyncer:
    """The event that a learner tells.

    Raises:
      WireError: the message is no event, or has numbers that cannot be.
    """
    match message.WhichOneof("kind"):
        case "join":
            m = message.join
            if not m.HasField("step"):
                return events.LearnerJoined(learner, checked_number(m.incarnation))
            versions = checked_numbers(m.versions, num_fragments)
            return events.LearnerJoined(
                learner, checked_number(m.incarnation), checked_number(m.step), versions
            )
        case "ready":
            m = message.ready
            versions = checked_numbers(m.versions, num_fragments)
            return events.LearnerReady(
                learner, checked_number(m.incarnation), checked_number(m.step), versions
            )
        case "report":
            m = message.report
            columns = (checked_numbers(column, num_fragments) for column in (m.versions, m.steps, m.tokens))
            counters = tuple(FragmentCounters(*row) for row in zip(*columns, strict=True))
            return events.StepReported(
                Report(learner, checked_number(m.incarnation), checked_number(m.step), counters)
            )
        case "lost":
            m = message.lost
            return events.LearnerLost(learner, checked_number(m.incarnation), m.reason[:LONGEST_REASON])
        case kind:
            raise WireError("unexpected message", f"{kind or 'an empty one'} where an event must be")


def from_syncer(event: SyncerNotice) -> pb.ToLearner:
    """The message of an event without arrays that the syncer tells a learner."""
    match event:
        case events.ClockSet():
            return pb.ToLearner(clock_set=pb.ClockSet(step=event.step))
        case events.NotMember():
            return pb.ToLearner(not_member=pb.NotMember(incarnation=event.incarnation))
        case events.Rejected():
            rejected = pb.Rejected(incarnation=event.incarnation, reason=event.reason[:LONGEST_REASON])
            return pb.ToLearner(rejected=rejected)


def syncer_event(message: pb.ToLearner) -> SyncerNotice:
    """The event without arrays that the syncer tells.

    Raises:
      WireError: the message is no such event, or has numbers that cannot be.
    """
    match message.WhichOneof("kind"):
        case "clock_set":
            return events.ClockSet(checked_number(message.clock_set.step))
        case "not_member":
            return events.NotMember(checked_number(message.not_member.incarnation))
        case "rejected":
            m = message.rejected
            return events.Rejected(checked_number(m.incarnation), m.reason[:LONGEST_REASON])
        case kind:
            raise WireError("unexpected message", f"{kind or 'an empty one'} where an event must be")


def up_header(pull: int, contribution: Contribution, size: int) -> pb.UpHeader:
    """What stands before the chunks of a contribution of `size` bytes."""
    c = contribution
    return pb.UpHeader(
        pull=pull,
        fragment=c.fragment,
        incarnation=c.incarnation,
        version=c.version,
        step=c.step,
        steps=c.steps,
        tokens=c.tokens,
        size=size,
    )


def contribution_of(header: pb.UpHeader, learner: int, fragment: int) -> Contribution:
    """The contribution that a header announces, which must be of this fragment.

    Raises:
      WireError: it is of another, or has numbers that cannot be.
    """
    if header.fragment != fragment:
        raise WireError("another fragment", f"{header.fragment} came where {fragment} was asked for")
    h = header
    numbers = map(checked_number, (h.incarnation, h.version, h.step, h.steps, h.tokens))
    incarnation, version, step, steps, tokens = numbers
    return Contribution(learner, incarnation, fragment, version, step, steps, tokens)


def check_down_header(header: pb.DownHeader, num_fragments: int) -> None:
    """Sees that the header of an update can be one of this model.

    Raises:
      WireError: it cannot.
    """
    if header.fragment >= num_fragments:
        raise WireError("another fragment", f"{header.fragment} of {num_fragments}")
    for value in (header.version, header.merged_step, header.step, header.welcome, header.epoch):
        checked_number(value)


def checked_number(value: int) -> int:
    """The number; raises WireError if it is beyond LARGEST."""
    if value > LARGEST:
        raise WireError("number too large", f"{value}")
    return value


def checked_numbers(values: Sequence[int], count: int) -> tuple[int, ...]:
    """The numbers, one a fragment; raises WireError if there are not `count`, or one cannot be."""
    if len(values) != count:
        raise WireError("another number of fragments", f"{len(values)} where there are {count}")
    return tuple(map(checked_number, values))
