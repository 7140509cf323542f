"""Records of a learner's run as messages of the wire, and back."""

from __future__ import annotations

import itertools
import json
import math
import sys

from ddiloco.goodput.accounting import State
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.event_messages import MAX_REASON_LENGTH
from ddiloco.remote.wire.validation import LARGEST, MAX_TEXT, WireError
from ddiloco.telemetry import records
from ddiloco.telemetry.scalars import as_json, numbers

MAX_RECORD_BYTES = 8 << 10  # bytes of JSON
MAX_METRICS = 1024  # some models have one for each layer
_NOTES: dict[str, dict[str, type]] = {  # what a learner may note, by name: the values and their kinds
    "drop": {"reason": str},
    "sdc": {"step": float, "devices": str},
    "recovered": {
        "inner_state": str,
        "donor_step": float,
        "trained": float,
        "bytes": float,
        "seconds": float,
    },
}

LearnerRecord = records.StepDone | records.StateChanged | records.Noted | records.LearnerDied | records.Alarm


def record_message(record: records.Record) -> pb.Record:
    """The message of a record; waits for metrics that are still on the devices.

    Raises:
      TypeError: records of this kind are not sent.
    """
    match record:
        case records.StepDone(_, step, time, tokens, metrics):
            metrics = dict(itertools.islice(metrics.items(), MAX_METRICS))
            values = {"step": step, "time": time, "tokens": tokens, "metrics": numbers(metrics)}
            return pb.Record(step_done=values)
        case records.StateChanged(_, state, time):
            return pb.Record(state_changed={"state": state.value, "time": time})
        case records.Noted(name, values, time):
            return pb.Record(noted={"name": name, "json": json.dumps(as_json(values)), "time": time})
        case records.LearnerDied(_, time, traceback):
            tail = traceback[-MAX_TEXT // 4 :]  # a character has four bytes at most
            return pb.Record(learner_died={"time": time, "traceback": tail})
        case records.Alarm(sentence, time):
            return pb.Record(alarm={"sentence": sentence[:MAX_TEXT], "time": time})
        case records.Transferred(learner, sent, received):
            return pb.Record(transferred={"learner": learner, "sent": sent, "received": received})
    raise TypeError(f"a {type(record).__name__} does not travel")


def learner_record(message: pb.Record, learner: int) -> LearnerRecord:
    """The record in a message from this learner.

    Raises:
      WireError: it holds no possible record.
    """
    kind = message.WhichOneof("kind")
    match kind:
        case "step_done":
            m = message.step_done
            if m.step > LARGEST or m.tokens > LARGEST or len(m.metrics) > MAX_METRICS:
                raise WireError("malformed record", "a step with numbers that cannot be")
            return records.StepDone(learner, m.step, _time(m.time), m.tokens, dict(m.metrics))
        case "state_changed":
            m = message.state_changed
            try:
                return records.StateChanged(learner, State(m.state), _time(m.time))
            except ValueError:
                raise WireError("malformed record", f"no state is called {m.state[:40]!r}") from None
        case "noted":
            m = message.noted
            if m.name not in _NOTES:  # other records come from the syncer only
                raise WireError("malformed record", f"a note of {m.name[:40]!r}")
            given = _values(m.json)
            values = {name: _value(given.get(name), kind) for name, kind in _NOTES[m.name].items()}
            return records.Noted(m.name, {"learner": learner, **values}, _time(m.time))
        case "learner_died":
            m = message.learner_died
            return records.LearnerDied(learner, _time(m.time), m.traceback[-MAX_TEXT:])
        case "alarm":
            m = message.alarm
            return records.Alarm(f"learner {learner}: {m.sentence[:MAX_TEXT]}", _time(m.time))
    raise WireError("malformed record", "none that a learner sends")


def shard_record(message: pb.Record) -> records.Record:
    """The record in a message of a shard, which is trusted. Raises WireError: it holds none that is sent."""
    match message.WhichOneof("kind"):
        case "noted":
            return records.Noted(message.noted.name, json.loads(message.noted.json), message.noted.time)
        case "alarm":
            return records.Alarm(message.alarm.sentence, message.alarm.time)
        case "transferred":
            t = message.transferred
            return records.Transferred(t.learner, t.sent, t.received)
    raise WireError("malformed record", "none that a shard sends")


def _time(seconds: float) -> float:
    if not (math.isfinite(seconds) and 0 <= seconds < 1e11):
        raise WireError("malformed record", f"at time {seconds}")
    return seconds


def _value(value: object, kind: type) -> str | float | None:
    """The value if it is a finite number or short text of the kind; else None, or "unknown" for a text."""
    if kind is str:
        return value[:MAX_REASON_LENGTH] if isinstance(value, str) else "unknown"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number and abs(value) <= sys.float_info.max else None


def _values(text: str) -> dict:
    try:
        values = json.loads(text) if len(text) <= MAX_RECORD_BYTES else None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise WireError("malformed record", "a note without values")
    return values
