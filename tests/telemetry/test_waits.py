"""What a process waits for is said: on a progress line where one is drawn, else in a line of its own."""

import queue

import pytest

from ddiloco.telemetry.waits import Waits

LIMIT = 30.0


@pytest.fixture
def lines():
    return queue.SimpleQueue()


def test_a_long_wait_is_told_once_where_no_progress_line_is_drawn(lines):
    waits = Waits(lines.put, shown_after=0.0)
    waits.name = "learner 1"
    with waits.waiting("the syncer"):
        assert lines.get(timeout=LIMIT) == "learner 1: waiting for the syncer"
        assert not waits.not_shown()
    assert waits.reason() is None
    assert lines.empty()


def test_a_progress_line_has_the_reason_that_began_last(lines):
    waits = Waits(lines.put, shown_after=0.0)
    with waits.on_progress_line(), waits.waiting("the end"):
        assert waits.not_shown()
        with waits.waiting("learner 2 to leave"):
            assert waits.reason() == "waiting 0 s for learner 2 to leave"
            assert not waits.not_shown()
        assert waits.reason() == "waiting 0 s for the end"


def test_short_waits_are_nobodys_business(lines):
    waits = Waits(lines.put, shown_after=LIMIT)
    with waits.waiting("a moment"):
        assert (waits.reason(), waits.not_shown()) == (None, False)


def test_a_wait_that_fails_is_over(lines):
    waits = Waits(lines.put, shown_after=0.0)
    with pytest.raises(OSError), waits.waiting("the disk"):
        raise OSError
    assert waits.reason() is None
