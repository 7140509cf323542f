"""The line that the terminal shows, and the lines above it."""

import dataclasses
import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.observe.progress import LIVE_EVERY, PLAIN_EVERY, Pace, Progress, Status, format_status

STATUS = Status(
    step=1200,
    total_steps=5000,
    loss=2.34567,
    tokens_per_second=123456.0,
    alive=3,
    num_learners=4,
    merged_share=0.9149,
    quorum=3,
    grace_seconds=0.0421,
    goodput=0.9876,
    elapsed=3725.0,
    remaining=59.0,
)
WIDTH = 80  # of a terminal
UNKNOWN = Status(0, 10, None, None, 2, 2, None, None, None, None, 0.0, None)


@pytest.fixture(autouse=True)
def _terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))


def test_a_hundred_columns_show_everything():
    begin = "loss 2.346  123.5k tok/s  alive 3/4  1:02:05<0:59  goodput 98.8%"
    figures = f"{begin}  merged 91%  quorum 3  grace 42 ms"
    assert format_status(STATUS, 120) == f"step 1200/5000  {figures}"
    usual = dataclasses.replace(STATUS, elapsed=725.0, step=400, total_steps=500)
    assert format_status(usual, 100).endswith("quorum 3")  # the grace window is in the metrics


def test_what_was_measured_of_steps_is_shown_where_there_is_room():
    measured = dataclasses.replace(
        STATUS,
        mfu=0.4321,
        step_seconds=0.1234,
        slow_step_seconds=1.5,
        data_wait_share=0.004,
        peak_bytes=3 << 29,
    )
    line = format_status(measured, 180)
    assert "merged 91%  MFU 43.2%  p50 123 ms  p99 1.50 s  data wait 0.4%  peak 1.5 GiB  quorum" in line


def test_what_is_not_known_yet_is_a_dash():
    assert format_status(UNKNOWN, 100) == (
        "step 0/10  loss -  - tok/s  alive 2/2  0:00<-  goodput -  merged -  quorum -  grace - ms"
    )


numbers = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))
counts = st.integers(0, 10**12)


@given(
    st.builds(
        Status,
        step=counts,
        total_steps=counts,
        loss=numbers,
        tokens_per_second=numbers,
        alive=counts,
        num_learners=counts,
        merged_share=st.one_of(st.none(), st.floats(0, 1)),
        quorum=st.one_of(st.none(), counts),
        grace_seconds=numbers,
        goodput=st.one_of(st.none(), st.floats(0, 1)),
        elapsed=st.floats(-1e9, 1e9),
        remaining=st.one_of(st.none(), st.floats(0, 1e9)),
    ),
    st.integers(1, 200),
)
def test_no_status_is_as_wide_as_the_terminal_and_the_step_comes_first(status, columns):
    line = format_status(status, columns)
    assert len(line) < columns and "\n" not in line
    assert line.startswith(f"step {status.step}/{status.total_steps}"[: columns - 1])


@pytest.mark.parametrize(
    ("rate", "shown"),
    [(0.0, "0"), (999.4, "999"), (1e3, "1.0k"), (2.5e6, "2.5M"), (7.25e9, "7.2G"), (math.inf, "-")],
)
def test_rates_have_a_unit(rate, shown):
    assert f"  {shown} tok/s" in format_status(dataclasses.replace(STATUS, tokens_per_second=rate), 120)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0:00"), (61, "1:01"), (3600, "1:00:00"), (90000, "1d01h"), (-5, "0:00")]
)
def test_times_are_short(seconds, shown):
    assert f"  {shown}<0:59" in format_status(dataclasses.replace(STATUS, elapsed=seconds), 120)


def test_pace_is_that_of_the_window():
    pace = Pace(window=10.0)
    assert pace.tokens_per_second() is None and pace.seconds_for(5) is None
    pace.add(0.0, 0, 0)
    assert pace.tokens_per_second() is None and pace.seconds_for(5) is None
    for second in range(1, 21):
        pace.add(float(second), 2 * second, 100 * second if second <= 10 else 300 * second - 2000)
    assert pace.tokens_per_second() == 300.0
    assert pace.seconds_for(5) == 2.5
    assert pace.seconds_for(-5) == 0.0


def test_pace_ignores_a_clock_that_was_set_back_and_knows_no_end_of_a_run_at_rest():
    pace = Pace()
    for time, step in ((5.0, 1), (4.0, 9), (5.0, 9), (7.0, 1)):
        pace.add(time, step, step)
    assert pace.tokens_per_second() == 0.0
    assert pace.seconds_for(1) is None


def test_lines_stand_above_the_live_one_which_is_drawn_over(terminal):
    screen = terminal()
    progress = Progress(live=True)
    assert progress.live and progress.every == LIVE_EVERY
    progress.say("before")
    progress.show(STATUS)
    progress.say("an evaluation")
    progress.show(UNKNOWN)
    progress.news("a return")
    progress.end()
    progress.say("after")
    last = format_status(UNKNOWN, WIDTH)
    assert screen.lines() == ["before", "an evaluation", "a return", last, "after", ""]


def test_warnings_go_to_stderr_and_leave_the_live_line_in_place(terminal):
    screen, err = terminal(), io.StringIO()
    progress = Progress(live=True, err=err)
    progress.show(UNKNOWN)
    progress.warn("the disk is full")
    assert err.getvalue() == "ddiloco: the disk is full\n"
    assert screen.lines() == [format_status(UNKNOWN, WIDTH)]


@pytest.mark.parametrize("live", [True, False])
def test_without_a_terminal_every_line_is_plain(monkeypatch, live):
    monkeypatch.delenv("CI", raising=False)
    out = io.StringIO()
    progress = Progress(live, out=out)
    assert not progress.live and progress.every == PLAIN_EVERY
    progress.show(STATUS)
    progress.news("a return")
    progress.say("an evaluation")
    progress.end()
    assert out.getvalue() == f"{format_status(STATUS, 120)}\na return\nan evaluation\n"


def test_in_ci_only_evaluations_and_problems_are_shown(monkeypatch, terminal):
    monkeypatch.setenv("CI", "true")
    screen, err = terminal(), io.StringIO()
    progress = Progress(live=True, err=err)
    progress.show(STATUS)
    progress.news("a return")
    progress.say("an evaluation")
    progress.warn("a problem")
    progress.end()
    assert screen.getvalue() == "an evaluation\n"
    assert err.getvalue() == "ddiloco: a problem\n"
