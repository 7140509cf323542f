"""What is told to a core, or noted of its arrays, comes back from its bytes as it was."""

import dataclasses
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report, RoundId, Watermark
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.work import FragmentWork, LearnerWork
from ddiloco.storage.tape import entries as entries_module
from ddiloco.storage.tape import header as headers
from ddiloco.storage.tape import tape_pb2 as pb
from ddiloco.storage.tape.entries import (
    Adopted,
    Committed,
    End,
    Entry,
    Gave,
    InnerOrigin,
    entries_of,
    message_of,
    payload_of,
    record_of,
)

number = st.integers(0, 2**53)
small = st.integers(0, 40)
numbers = st.lists(number, max_size=5).map(tuple)
text = st.text(max_size=20)
rounds = st.builds(RoundId, number, number)
watermarks = st.builds(Watermark, number, number, text)
contributions = st.builds(Contribution, *[number] * 8, watermarks, watermarks)
origins = st.builds(InnerOrigin, number, number, number)

REPORTS = st.builds(
    Report,
    *[number] * 3,
    st.lists(st.builds(FragmentCounters, number, number, number), max_size=3).map(tuple),
    st.booleans(),
)

EVENTS = st.one_of(
    st.builds(events.Welcomed, number, number, numbers, numbers),
    st.builds(
        events.Welcomed,
        *[number] * 2,
        *[numbers] * 4,
        st.lists(watermarks, max_size=3).map(tuple),
        watermarks,
    ),
    st.builds(events.NotMember, number),
    st.builds(events.Rejected, number, text),
    st.builds(events.StepStarted, number),
    st.builds(events.StepFinished),
    st.builds(events.ClockSet, number),
    st.builds(events.OfferAsked, rounds, number, number),
    st.builds(events.UpdateArrived, number, number, number, watermarks, number),
    st.builds(events.Heartbeat),
    st.builds(events.LearnerJoined, number, number),
    st.builds(events.LearnerJoined, number, number, number, numbers),
    st.builds(events.LearnerJoined, number, number, number, numbers, numbers, number, watermarks),
    st.builds(events.LearnerReady, number, number, number, numbers),
    st.builds(events.LearnerLost, number, number, text),
    st.builds(events.StepReported, REPORTS),
    st.builds(events.FragmentArrived, rounds, contributions),
    st.builds(events.OfferFailed, rounds, number, number, text),
    st.builds(events.MergeFinished, rounds, numbers),
    st.builds(events.Timeout),
    st.builds(events.TimingSet, *[number] * 3, *[st.floats(allow_nan=False)] * 2, text, number),
)
NOTES = st.one_of(
    st.builds(Adopted, st.none(), st.booleans()),
    st.builds(Adopted, origins, st.just(False)),
    st.builds(Gave, number),
    st.builds(Committed, number, number, st.binary(min_size=32, max_size=32)),
    st.builds(End, numbers),
)
ENTRIES = st.one_of(
    st.builds(Entry, st.floats(allow_nan=False, allow_infinity=False), EVENTS),
    st.builds(Entry, st.none(), NOTES),
)


@given(st.lists(ENTRIES, max_size=8))
def test_entries_come_back_as_they_were(entries):
    record = pb.Record(entries=[message_of(entry.content, entry.now) for entry in entries])
    assert entries_of(payload_of(record)) == entries


@given(st.binary(max_size=60), st.booleans())
def test_any_bytes_are_entries_or_a_value_error(data, compressed):
    try:
        entries = entries_of(zlib.compress(data) if compressed else data)
    except ValueError:
        return
    assert all(isinstance(entry, Entry) for entry in entries)


def test_a_record_that_is_cut_has_more_behind_it_or_would_become_too_long_is_none(monkeypatch):
    payload = payload_of(pb.Record(header="x" * 1000))
    assert record_of(payload).header == "x" * 1000
    for harmed in (payload[:-1], payload + b"more"):
        with pytest.raises(ValueError, match="a record that cannot be read"):
            record_of(harmed)
    monkeypatch.setattr(entries_module, "_LONGEST", 900)
    with pytest.raises(ValueError, match="longer than any"):
        record_of(payload)


WORK = FragmentWork(2, 5, 3, 30, 4, Watermark(9, 5), {7: (2, 20)})
LEARNER = LearnerWork(7, 9, 8, (WORK, WORK), {3: 6})
STATE = SyncerState((1, 2), (3, 4), ((0, 5),), watermarks=({0: Watermark(5, 3, "[1]")}, {}))
MACHINE = headers.Machine("cpu", ("cpu", "cpu"), {"data": 2, "fsdp": 1}, 8, "", {"jax": "0.10.2"})


@pytest.mark.parametrize(
    "changes",
    [
        {"learner": 2, "position": {"stream": {"seed": 1}, "shards": {"0": [1, 2]}}},
        {"resumed": headers.ResumedWith(LEARNER)},
        {"resumed": headers.ResumedWith(LEARNER, Watermark(9, 5), origin=InnerOrigin(0, 9, 4))},
        {"role": "syncer", "state": STATE, "sha256": ("ab", "cd")},
    ],
)
def test_a_header_comes_back_as_it_was(changes):
    header = headers.Header("learner", None, 1, "local", "c0", "1a", MACHINE, 12.5, 1.7e9)
    header = dataclasses.replace(header, **changes)
    assert headers.from_json(headers.to_json(header)) == header


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"machine": 1}', '{"machine": {}, "state": null}'])
def test_a_header_that_is_none_is_a_value_error(text):
    with pytest.raises(ValueError):
        headers.from_json(text)
