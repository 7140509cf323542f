"""State as JSON values: what comes back is what was written, and nothing else is read."""

import collections
import dataclasses
import enum
import json
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.virtual.graph import GraphError, Reader, Vocabulary, Writer
from ddiloco.virtual.vocabulary import vocabulary


class Colour(enum.Enum):
    """Two of them."""

    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Cannot change."""

    name: str
    of: object = None


@dataclasses.dataclass
class Node:
    """Can change, and be referred to twice."""

    value: object
    next: object = None


class Keeper:
    """Has state that is put back into another one."""

    def __init__(self, inner=None):
        self.held = None
        self.inner = inner
        self._config = "mine"


KNOWN = Vocabulary([Colour, Fixed, Node], {Keeper: ("_config",)})


def there_and_back(thing, known=KNOWN, named=()):
    writer = Writer(known, dict(named))
    told = json.loads(json.dumps(writer.write(thing), allow_nan=False))
    return Reader(known, dict(named), [np.asarray(a) for a in writer.arrays]).read(told)


SIMPLE = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(Colour)
    | st.builds(Fixed, st.text(), st.integers())
)
KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.integers()) | st.builds(Fixed, st.text())
THINGS = st.recursive(
    SIMPLE,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(collections.deque)
        | st.dictionaries(KEYS, inner)
        | st.sets(st.integers())
        | st.frozensets(st.tuples(st.integers(), st.text()))
        | st.builds(Node, inner)
        | st.builds(Fixed, st.text(), inner)
    ),
    max_leaves=12,
)


@given(THINGS)
def test_what_comes_back_is_what_was_written(thing):
    back = there_and_back(thing)
    assert back == thing
    assert Writer(KNOWN, {}).write(back) == Writer(KNOWN, {}).write(thing)  # of the same types, too


@pytest.mark.parametrize("value", [math.inf, -math.inf, 5e-324, -0.0, 0.1, 1e308])
def test_floats_come_back_to_the_bit(value):
    assert there_and_back(value).hex() == value.hex()


def test_no_number_is_one_too():
    assert math.isnan(there_and_back(math.nan))


def test_two_references_to_one_object_that_can_change_stay_so():
    one, twin = Node(1), Node(1)
    a, b, c = there_and_back([one, one, twin])
    assert a is b
    assert c is not a
    assert (a, c) == (one, twin)


def test_an_object_may_refer_to_itself():
    ring = Node("first")
    ring.next = Node("second", ring)
    back = there_and_back(ring)
    assert back.next.next is back
    assert (back.value, back.next.value) == ("first", "second")


def test_a_random_stream_goes_on_where_it_was():
    rng = random.Random(7)
    rng.gauss(0, 1)  # keeps the other one of its pair
    back = there_and_back(rng)
    assert [back.gauss(0, 1) for _ in range(700)] == [rng.gauss(0, 1) for _ in range(700)]
    assert back.getstate() == rng.getstate()


@pytest.mark.parametrize("dtype", ["float32", "int8", "uint16", "bool", "float16"])
def test_arrays_come_back_and_each_is_kept_once(dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    writer = Writer(KNOWN, {})
    told = writer.write([array, {"again": array}, array[:], array[0]])
    assert len(writer.arrays) == 2
    back = Reader(KNOWN, {}, writer.arrays).read(json.loads(json.dumps(told)))
    assert np.array_equal(back[0], array) and back[0] is back[2]
    assert np.array_equal(back[3], array[0])


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool"])
def test_an_array_without_an_axis_is_a_number_of_its_type(dtype):
    back = there_and_back(np.array(0.1, dtype))
    assert back.dtype == dtype
    assert back == np.array(0.1, dtype)


def test_what_has_a_name_is_written_as_its_name():
    thing = object()
    assert there_and_back([thing, 1], named={"it": thing})[0] is thing


def test_owners_are_filled_and_keep_what_is_no_state():
    one, other = Keeper(Keeper()), Keeper(Keeper())
    one.held, one.inner.held, one._config = [1, (2,)], Node(3), "theirs"
    inner = other.inner
    Reader(KNOWN, {}, []).fill(other, json.loads(json.dumps(Writer(KNOWN, {}).fields(one))))
    assert (other.held, other.inner.held, other._config) == ([1, (2,)], Node(3), "mine")
    assert other.inner is inner


class Stranger:
    """Is in no vocabulary."""


@dataclasses.dataclass
class Node2(Node):
    """Neither is this, though it is a known class's child."""


class Mine(list):
    """A list with something more."""


@pytest.mark.parametrize("thing", [Stranger(), Node2(1), Mine(), lambda: None, 1j, b"", object, iter([])])
def test_what_is_not_known_is_not_written(thing):
    with pytest.raises(GraphError, match="cannot be recorded"):
        Writer(KNOWN, {}).write([thing])


FIXED = {"value": "test_graph.Fixed", "fields": {"name": "a", "of": None}}


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ({"value": "os.system", "fields": {}}, "class 'os.system' is unknown"),
        ({"value": "test_graph.Keeper", "fields": {}}, "class 'test_graph.Keeper' is unknown"),
        ({"enum": "test_graph.Colour", "name": "GREEN"}, "test_graph.Colour 'GREEN' is unknown"),
        ({**FIXED, "fields": {"name": "a"}}, "test_graph.Fixed has other fields: of"),
        ({**FIXED, "fields": {"name": "a", "of": 1, "more": 2}}, "test_graph.Fixed has other fields: more"),
        ({"named": "nobody"}, "name 'nobody' is unknown"),
        ({"same": 4}, "object 4 is unknown"),
        ({"array": 1}, "array 1 is missing"),
        ({"random": [3, "00", 624, None]}, "random stream"),
        ({"lambda": 1}, "'lambda' is no kind of object"),
        ({}, "is no object"),
    ],
)
def test_what_is_not_known_is_not_read(told, problem):
    with pytest.raises(GraphError, match=problem):
        Reader(KNOWN, {}, []).read([told])


def test_an_owner_with_other_fields_or_of_another_class_is_not_filled():
    fields = Writer(KNOWN, {}).fields(Keeper())
    with pytest.raises(GraphError, match="Keeper has other fields: extra"):
        Reader(KNOWN, {}, []).fill(Keeper(), {**fields, "extra": 1})
    held = Writer(KNOWN, {}).fields(Keeper(Keeper()))
    with pytest.raises(GraphError, match=r"Keeper\.inner was test_graph\.Keeper, is builtins\.NoneType"):
        Reader(KNOWN, {}, []).fill(Keeper(), held)


def test_no_two_classes_of_a_fleet_have_one_name():
    with pytest.raises(AssertionError, match="two classes have one name"):
        Vocabulary([Fixed, Fixed], {})
    known = vocabulary()
    assert {"accounting.State", "membership.State"} <= set(known.values)
    assert not {*known.values.values()} & {*known.owners}
