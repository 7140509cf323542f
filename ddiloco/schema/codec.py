"""Events as messages of events.proto, and back: names and fields are the same, so one rule serves all."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from google.protobuf.message import Message

from ddiloco.protocol import events, messages
from ddiloco.schema import events_pb2 as pb

Event = events.LearnerEvent | events.SyncerEvent

_PARTS = (
    messages.RoundId,
    messages.FragmentCounters,
    messages.Report,
    messages.Contribution,
    messages.OfferReceipt,
    messages.Watermark,
)
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (*typing.get_args(Event), *_PARTS)}
_NAMES = {_KINDS[field.message_type.name]: field.name for field in pb.Event.DESCRIPTOR.fields}


def message_of(told: Event) -> pb.Event:
    """The message of an event; raises ValueError where a number has more than 64 bits."""
    match told:  # `asdict` is slow where there are many fragments, and reports are the frequent ones
        case events.StepReported(report):
            value: Any = pb.StepReported(report=_report_message(report))
        case _:
            value = dataclasses.asdict(told)
    return pb.Event(**{_NAMES[type(told)]: value})


def _report_message(r: messages.Report) -> pb.Report:
    counters = [pb.FragmentCounters(version=c.version, steps=c.steps, tokens=c.tokens) for c in r.counters]
    return pb.Report(
        learner=r.learner,
        incarnation=r.incarnation,
        step=r.step,
        counters=counters,
        adopted=r.adopted,
        shards=r.shards,
    )


def told_by(message: pb.Event) -> Any:
    """The event that a message holds. Raises ValueError: it holds none."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise ValueError("an empty event")
    return read(getattr(message, kind))


def read(message: Message) -> Any:
    """The event that a message of the schema stands for, or the part of one."""
    kind = _KINDS[message.DESCRIPTOR.name]
    if kind is events.LearnerJoined and not message.HasField("step"):
        return events.LearnerJoined(message.learner, message.incarnation, shards=tuple(message.shards))
    return kind(*(_value(getattr(message, field.name)) for field in dataclasses.fields(kind)))


def _value(value: Any) -> Any:
    match value:
        case int() | float() | str() | bytes():
            return value
        case Message():
            return read(value)
    return tuple(map(_value, value))
