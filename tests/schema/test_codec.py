"""Events come back from their bytes; the schema has their names and fields, and each proto its module."""

import dataclasses
import importlib.util
import pathlib
import re
import sys
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.protocol import events, messages
from ddiloco.schema import codec
from ddiloco.schema import events_pb2 as pb

ROOT = pathlib.Path(__file__).parents[2]
NUMBER = st.integers(-(2**63), 2**63 - 1)
STRATEGIES = {
    "int": NUMBER,
    "bool": st.booleans(),
    "float": st.floats(allow_nan=False),
    "str": st.text(max_size=20),
    "bytes": st.binary(max_size=20),
    "tuple[int, ...]": st.lists(NUMBER, max_size=5).map(tuple),
    "int | None": NUMBER,
    "tuple[int, ...] | None": st.lists(NUMBER, max_size=5).map(tuple),
}


def built(kind):
    """Any value of a dataclass of the protocol."""
    return st.builds(kind, *(strategy(field.type) for field in dataclasses.fields(kind)))


def strategy(annotation):
    if annotation in STRATEGIES:
        return STRATEGIES[annotation]
    repeated = re.fullmatch(r"tuple\[(\w+), \.\.\.\]", annotation)
    if repeated:
        return st.lists(built(getattr(messages, repeated[1])), max_size=3).map(tuple)
    return built(getattr(messages, annotation))


EVENTS = st.one_of(
    *(built(kind) for kind in typing.get_args(codec.Event)), st.builds(events.LearnerJoined, NUMBER, NUMBER)
)


@given(EVENTS)
def test_every_event_comes_back_as_it_was(event):
    assert codec.told_by(pb.Event.FromString(codec.message_of(event).SerializeToString())) == event


def test_the_schema_has_all_events_with_the_fields_that_they_have():
    told = {field.message_type.name for field in pb.Event.DESCRIPTOR.fields}
    assert told == {kind.__name__ for kind in typing.get_args(codec.Event)}
    for name, message in pb.DESCRIPTOR.message_types_by_name.items():
        if name not in ("Event", "Report"):  # a report has its bases in columns
            kind = next(getattr(of, name) for of in (events, messages) if hasattr(of, name))
            assert [f.name for f in dataclasses.fields(kind)] == [f.name for f in message.fields], name


def test_an_empty_message_and_a_number_without_bounds_are_value_errors():
    with pytest.raises(ValueError, match="an empty event"):
        codec.told_by(pb.Event())
    with pytest.raises(ValueError):
        codec.message_of(events.ClockSet(1 << 64))


@pytest.mark.parametrize("proto", sorted(ROOT.glob("ddiloco/**/*.proto")), ids=lambda path: path.stem)
def test_a_generated_module_is_what_its_proto_file_gives(proto, tmp_path):
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("needs grpcio-tools")
    from grpc_tools import protoc

    source = proto.relative_to(ROOT)
    assert protoc.main([sys.executable, f"-I{ROOT}", f"--python_out={tmp_path}", str(source)]) == 0
    made = source.with_name(f"{proto.stem}_pb2.py")
    assert (tmp_path / made).read_text() == (ROOT / made).read_text()
