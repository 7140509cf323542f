"""Events as messages of events.proto, and back: names and fields are the same, so one rule serves all."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from ddiloco.protocol import events, messages
from ddiloco.schema import events_pb2 as pb

Event = events.LearnerEvent | events.SyncerEvent

_PARTS = (
    messages.RoundId,
    messages.Report,
    messages.Contribution,
    messages.OfferReceipt,
    messages.Watermark,
)
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (*typing.get_args(Event), *_PARTS)}
_NAMES = {_KINDS[field.message_type.name]: field.name for field in pb.Event.DESCRIPTOR.fields}


def message_of(told: Event, before: messages.Report | None = None) -> pb.Event:
    """The message of an event; raises ValueError where a number has more than 64 bits.

    `before`: the report that the receiver had last; None: none, or it has forgotten it.
    """
    match told:
        case events.StepReported(report):
            return pb.Event(step_reported=pb.StepReported(report=_report_message(report, before)))
    return pb.Event(**{_NAMES[type(told)]: fields_of(told)})


def fields_of(told: Any) -> dict[str, Any]:
    """The fields of an event, or of a part of one, as its message takes them: `asdict` without its copies."""
    return {name: _plain(getattr(told, name)) for name in _names(type(told))}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [*map(_plain, value)]
    return fields_of(value) if dataclasses.is_dataclass(value) else value


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _report_message(r: messages.Report, before: messages.Report | None) -> pb.Report:
    places = r.changed_since(before)
    changed = [r.bases[i] for i in places]
    return pb.Report(
        learner=r.learner,
        incarnation=r.incarnation,
        step=r.step,
        adopted=r.adopted,
        shards=r.shards,
        steps=r.steps,
        tokens=r.tokens,
        places=places if len(places) < len(r.bases) else (),
        versions=[base.version for base in changed],
        base_steps=[base.steps for base in changed],
        base_tokens=[base.tokens for base in changed],
    )


def report_of(m: pb.Report, before: messages.Report | None = None) -> messages.Report:
    """The report in a message; `before` is as in `message_of`.

    Raises:
      ValueError: there is none, or there are changes but nothing that has changed.
    """
    rows = zip(m.versions, m.base_steps, m.base_tokens, strict=True)
    changed = [messages.FragmentCounters(*row) for row in rows]
    bases: Sequence[messages.FragmentCounters] = changed
    if m.places or not changed:
        bases = [*(before.bases if before is not None else ())]
        for place, base in zip(m.places, changed, strict=True):
            if not 0 <= place < len(bases):
                raise ValueError(f"a change of fragment {place} of {len(bases)}")
            bases[place] = base
    known = tuple(bases), m.adopted, tuple(m.shards), m.steps, m.tokens
    return messages.Report(m.learner, m.incarnation, m.step, *known)


def told_by(message: pb.Event, before: messages.Report | None = None) -> Any:
    """The event that a message holds; `before` is as in `message_of`. Raises ValueError: it holds none."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise ValueError("an empty event")
    if kind == "step_reported":
        return events.StepReported(report_of(message.step_reported.report, before))
    return read(getattr(message, kind))


def read(message: Message) -> Any:
    """The event that a message of the schema stands for, or the part of one."""
    kind = _KINDS[message.DESCRIPTOR.name]
    if kind is messages.Report:
        return report_of(message)
    if kind is events.LearnerJoined and not message.HasField("step"):
        return events.LearnerJoined(message.learner, message.incarnation, shards=tuple(message.shards))
    return kind(*[_value(getattr(message, name)) for name in _names(kind)])


def _value(value: Any) -> Any:
    match value:
        case int() | float() | str() | bytes():
            return value
        case Message():
            return read(value)
    return tuple(map(_value, value))
