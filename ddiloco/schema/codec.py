"""Events as messages of events.proto, and back: names and fields are the same, so one rule serves all."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from google.protobuf.message import Message

from ddiloco.protocol import events, messages, news
from ddiloco.schema import events_pb2 as pb

Event = events.LearnerEvent | events.SyncerEvent

_PARTS = (
    messages.RoundId,
    messages.FragmentCounters,
    messages.Report,
    messages.Contribution,
    messages.Watermark,
)
_UNIONS = {pb.Event: Event, pb.News: news.News, pb.Word: news.Word}
_KINDS: dict[str, type] = {
    kind.__name__: kind for union in _UNIONS.values() for kind in typing.get_args(union)
} | {kind.__name__: kind for kind in _PARTS}
_PLACES = {
    _KINDS[field.message_type.name]: (union, field.name)
    for union in _UNIONS
    for field in union.DESCRIPTOR.fields
}


def message_of(told: Event | news.News | news.Word) -> Any:
    """The message of an event, of the authority's news or of a part's word, which is one kind of it.

    Raises ValueError where a number has more than 64 bits.
    """
    union, name = _PLACES[type(told)]
    match told:  # `asdict` is slow where there are many fragments, and reports are the frequent ones
        case events.StepReported(report):
            value: Any = pb.StepReported(report=_report_message(report))
        case news.Heard(report, step_time):
            value = pb.Heard(report=_report_message(report), step_time=step_time)
        case _:
            value = dataclasses.asdict(told)
    return union(**{name: value})


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


def told_by(message: pb.Event | pb.News | pb.Word) -> Any:
    """The event, news or word that a message holds. Raises ValueError: it holds none."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise ValueError("an empty event")
    return read(getattr(message, kind))


def read(message: Message) -> Any:
    """The event that a message of the schema stands for, or the part of one."""
    kind = _KINDS[message.DESCRIPTOR.name]
    if kind is events.LearnerJoined and not message.HasField("step"):
        return events.LearnerJoined(message.learner, message.incarnation, shards=tuple(message.shards))
    if kind is news.Heard and not message.HasField("step_time"):
        return news.Heard(read(message.report), None)
    return kind(*(_value(getattr(message, field.name)) for field in dataclasses.fields(kind)))


def _value(value: Any) -> Any:
    match value:
        case int() | float() | str():
            return value
        case Message():
            return read(value)
    return tuple(map(_value, value))
