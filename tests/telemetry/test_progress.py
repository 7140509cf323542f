"""The line that the terminal shows, and the lines above it."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.goodput.accounting import State
from ddiloco.telemetry.progress import LIVE_EVERY, Progress, RecentSpeed, Stall, fitted, glance
from ddiloco.telemetry.records import Noted, StateChanged
from ddiloco.telemetry.state import RunState
from tests.telemetry.monitor_script import step

WIDTH = 80  # of a terminal
KNOWN = ["step 1200/5000", "loss 2.346", "123 k tok/s", "alive 3/4"]
UNKNOWN = ["step 0/10", "alive 4/4", "0:03"]


@pytest.fixture(autouse=True)
def _terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))


@pytest.fixture
def state(run_info):
    """A run of four learners, of which one has died, at its 725th second."""
    state = RunState(run_info(4, num_fragments=1, total_steps=500), 0.0)
    for learner in range(4):
        state.apply(StateChanged(learner, State.STEPPING, 0.0))
    state.apply(StateChanged(3, State.FAILED, 362.5))
    for learner in range(3):
        state.apply(step(learner, 400, 720.0, tokens=100, loss=2.34567))
    values = {"step": 400, "fragment": 0, "quorum": 3, "grace_seconds": 0.0421}
    state.apply(Noted("round", {**values, "contributions": [[m, 1, 0, 1, 1, 91] for m in range(3)]}, 721.0))
    return state


def paced(*samples):
    speed = RecentSpeed()
    for sample in samples:
        speed.add(*sample)
    return speed


def test_a_glance_has_what_matters_most_first(state):
    speed = paced((700.0, 300, 0), (720.0, 400, 2_469_120))
    assert "  ".join(glance(state, speed, 725.0)) == (
        "step 400/500  loss 2.346  123 k tok/s  alive 3/4  12:05<0:20  goodput 87.5%  merged 91%  quorum 3  "
        "grace 42 ms"
    )


def test_a_glance_at_a_run_that_has_just_begun_has_what_is_known_alone(run_info):
    state = RunState(run_info(4, num_fragments=1, total_steps=500), 0.0)
    assert glance(state, paced((5.0, 0, 0), (10.0, 0, 0)), 10.0) == ["step 0/500", "alive 4/4", "0:10"]


def test_a_timing_that_was_set_is_shown_with_its_reason(state):
    values = {"step": 300, "interval": 12, "quorum": 1, "reason": "plan"}
    state.apply(Noted("timing_set", values, 700.0))
    assert "  merged 91%  H 12 (plan)  quorum 3" in "  ".join(glance(state, paced(), 725.0))


@given(st.lists(st.text("abc ", min_size=1, max_size=60), min_size=1, max_size=12), st.integers(1, 200))
def test_no_line_is_as_wide_as_the_terminal_and_the_first_part_comes_first(parts, columns):
    line = fitted(parts, columns)
    assert len(line) < columns and line.startswith(parts[0][: columns - 1])


def test_speed_is_that_of_the_window():
    speed = RecentSpeed()
    assert speed.tokens_per_second() is None and speed.seconds_for(5) is None
    speed.add(0.0, 0, 0)
    assert speed.tokens_per_second() is None and speed.seconds_for(5) is None
    for second in range(1, 61):
        speed.add(float(second), 2 * second, 100 * second if second <= 30 else 300 * second - 6000)
    assert speed.tokens_per_second() == 300.0
    assert speed.seconds_for(5) == 2.5
    assert speed.seconds_for(-5) == 0.0


def test_speed_of_steps_that_take_longer_than_the_window_is_that_of_the_last_few():
    speed = RecentSpeed()
    for second in range(3000):
        speed.add(float(second), second // 300, 1000 * (second // 300))
    assert 4 / 5 * 1000 / 300 <= speed.tokens_per_second() <= 1000 / 300
    assert 300 <= speed.seconds_for(1) <= 5 / 4 * 300
    assert len(speed._samples) < 12  # however often it is asked for


def test_speed_ignores_a_clock_that_was_set_back_and_knows_no_end_of_a_run_at_rest():
    speed = RecentSpeed()
    for time, at in ((5.0, 1), (4.0, 9), (5.0, 9), (7.0, 1)):
        speed.add(time, at, at)
    assert speed.tokens_per_second() == 0.0
    assert speed.seconds_for(1) is None


def test_lines_stand_above_the_live_one_which_is_drawn_over(terminal):
    screen = terminal()
    progress = Progress()
    assert progress.live and progress.every == LIVE_EVERY
    progress.print_line("before")
    progress.show(KNOWN)
    progress.print_line("an evaluation")
    progress.show(UNKNOWN)
    progress.print_unless_quiet("a return")
    progress.end()
    progress.print_line("after")
    last = fitted(UNKNOWN, WIDTH)
    assert screen.lines() == ["before", "an evaluation", "a return", last, "after", ""]


def test_warnings_go_to_stderr_and_leave_the_live_line_in_place(terminal):
    screen, err = terminal(), io.StringIO()
    progress = Progress(err=err)
    progress.show(UNKNOWN)
    progress.warn("the disk is full")
    assert err.getvalue() == "ddiloco: the disk is full\n"
    assert screen.lines() == [fitted(UNKNOWN, WIDTH)]


def test_a_run_that_gets_no_further_says_where_its_learners_are(state):
    stall = Stall()
    assert stall.reason(state, 725.0) is None
    for learner, now in ((0, State.WAITING_FOR_PEERS), (1, State.RECONFIGURING), (2, State.STEPPING)):
        state.apply(StateChanged(learner, now, 726.0))
    assert stall.reason(state, 900.0) is None, "a step may take long"
    state.apply(StateChanged(2, State.WAITING_FOR_PEERS, 901.0))
    told = "no step for 200 s (learners: 2 waiting for peers, 1 reconfiguring, 1 failed)"
    assert stall.reason(state, 925.0) == told
    state.apply(step(2, 401, 930.0, tokens=100))
    assert stall.reason(state, 931.0) is None
    assert stall.reason(state, 936.0).startswith("no step for 5 s")


def test_learners_that_others_wait_for_after_the_last_step_are_named(state):
    state.apply(step(0, 500, 726.0, tokens=100))
    state.apply(StateChanged(0, State.FINISHED, 727.0))
    assert Stall().reason(state, 728.0) == "waiting for learners 1, 2 to end", "the other one is away"
    state.apply(StateChanged(1, State.FINISHED, 729.0))
    assert Stall().reason(state, 730.0) == "waiting for learner 2 to end"


def test_a_run_that_nobody_has_joined_says_so(run_info):
    state, stall = RunState(run_info(2, num_fragments=1, total_steps=5), 0.0), Stall()
    assert [stall.reason(state, now) for now in (0.0, 7.0)] == [None, "waiting 7 s for learners to join"]
