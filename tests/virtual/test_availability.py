"""Traces of what befalls learners: they read back to the bit, and a bad one is told in one line."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.config import ConfigError
from ddiloco.virtual.availability import EVENTS, Change, read_trace, write_trace

LEARNERS = 3
TIMES = st.floats(0, 1e12) | st.integers(0, 9).map(float)
SHARES = st.floats(0, 1, exclude_min=True)


@st.composite
def possible_lives(draw):
    """Changes in the order of their times, none of which befalls somebody who is not there for it."""
    there = draw(st.lists(st.booleans(), min_size=LEARNERS, max_size=LEARNERS))
    seen, changes = set(), []
    for time in sorted(draw(st.lists(TIMES, max_size=15))):
        learner = draw(st.integers(0, LEARNERS - 1))
        if there[learner]:
            event = draw(st.sampled_from([e for e in EVENTS if e not in ("join", "recover")]))
        else:
            event = draw(st.sampled_from(["join", "recover"])) if learner in seen else "join"
        if event in ("join", "recover", "fail", "leave"):
            there[learner] = event in ("join", "recover")
        seen.add(learner)
        changes.append(Change(time, learner, event, draw(SHARES) if event == "step" else 1.0))
    return changes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@given(changes=possible_lives())
def test_a_written_trace_reads_back_to_the_bit(changes, folder):
    write_trace(folder / "availability.csv", changes)
    assert read_trace(folder / "availability.csv", LEARNERS) == changes


def test_a_share_may_be_left_out_and_columns_may_stand_in_any_order(tmp_path):
    path = tmp_path / "availability.csv"
    path.write_text("event,time,learner\nfail,2,1\n\nrecover,3.5,1\n")
    assert read_trace(path, 2) == [Change(2.0, 1, "fail"), Change(3.5, 1, "recover")]
    path.write_text("time,learner,event,share\n2,1,detect,\n3,1,step,0.25\n")
    assert [change.share for change in read_trace(path, 2)] == [1.0, 0.25]


def test_a_learner_whose_first_change_is_a_join_is_not_there_before(tmp_path):
    path = tmp_path / "availability.csv"
    path.write_text("time,learner,event\n5,1,join\n7,1,leave\n9,1,join\n")
    assert [change.event for change in read_trace(path, 2)] == ["join", "leave", "join"]


def rows(*lines):
    return "\n".join(["time,learner,event,share", *lines]) + "\n"


BAD = {
    "empty": ("", "line 1: has no column time"),
    "misspelt column": (
        "time,learner,event,shares\n1,0,step,0.5\n",
        "line 2: change.shares: no such setting; did you mean share?",
    ),
    "missing column": ("time,event\n1,fail\n", "line 1: has no column learner"),
    "unknown event": (
        rows("1,0,dies,1"),
        "line 2: change.event: is 'dies', but must be one of join, leave, ",
    ),
    "learner above": (rows("1,0,fail,1", "2,3,fail,1"), "line 3: change.learner: is 3, but must be below 3"),
    "NaN time": (rows("nan,0,fail,1"), "line 2: change.time: is nan, but must be finite"),
    "recovers alive": (rows("1,0,recover,1"), "line 2: event: recover of learner 0 at 1 s, but it is there"),
    "joins twice": (rows("1,2,join,1", "2,2,join,1"), "line 3: event: join of learner 2 at 2 s, but it is "),
    "dies twice": (
        rows("4,1,fail,1", "2,1,fail,1"),
        "line 2: event: fail of learner 1 at 4 s, but it is not there",
    ),
    "joins twice, told out of order": (
        rows("5,1,join,1", "0,1,leave,1", "2,1,join,1"),
        "line 2: event: join of learner 1 at 5 s, but it is there",
    ),
    "endless field": (rows("1,0," + "x" * 200_000), "line 2: is not CSV: field larger than field limit"),
}


def told(path):
    with pytest.raises(ConfigError) as caught:
        read_trace(path, LEARNERS)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize(("text", "expected"), BAD.values(), ids=BAD)
def test_a_bad_trace_is_told_in_one_line_with_file_place_and_field(text, expected, tmp_path):
    (tmp_path / "availability.csv").write_text(text)
    assert told(tmp_path / "availability.csv").startswith(expected)


def test_a_trace_that_cannot_be_read_is_told_in_one_line(tmp_path):
    assert told(tmp_path / "none.csv") == "cannot be read: No such file or directory"
    assert told(tmp_path) == "cannot be read: Is a directory"
    (tmp_path / "availability.csv").write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe")
    assert told(tmp_path / "availability.csv").startswith(
        "cannot be read: 'utf-8' codec can't decode byte 0x89"
    )


@given(text=st.text() | st.from_regex(r"(time|learner|event|share|[0-9,.\-\n\"a-z])*", fullmatch=True))
def test_no_text_whatever_ends_in_anything_but_changes_or_one_line(text, folder):
    path = folder / "any.csv"
    path.write_text(text)
    try:
        changes = read_trace(path, LEARNERS)
    except ConfigError as error:
        assert str(error).startswith(f"{path}: ")
        assert len(str(error).splitlines()) == 1
    else:
        assert all(math.isfinite(change.time) and change.event in EVENTS for change in changes)
