"""Goodput, uptime and lost time: worked examples, and any history against a count second by second."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.goodput.accounting import ACTIVE, CAUSES, State, Timelines

STARTING, STEPPING, BLOCKED = State.STARTING, State.STEPPING, State.BLOCKED
RECOVERING, FAILED, FINISHED = State.RECOVERING, State.FAILED, State.FINISHED


def timelines(changes, chips=None):
    """Timelines after `changes`: (learner, state, time) each; one chip a learner unless told."""
    lines = Timelines(chips or dict.fromkeys({learner for learner, _, _ in changes}, 1))
    for learner, state, time in changes:
        lines.enter(learner, state, time)
    return lines


def figures(lines, now):
    return (
        lines.window(now),
        lines.goodput(now),
        lines.lost(now),
        lines.uptime(now),
        lines.blocked_seconds(now),
    )


def shares(blocked=0.0, recovering=0.0, failed=0.0):
    return {"blocked": blocked, "recovering": recovering, "failed": failed}


def test_the_example_of_the_documentation():
    lines = timelines(
        [
            (0, STEPPING, 0.0),
            (1, STEPPING, 0.0),
            (1, FAILED, 60.0),
            (1, RECOVERING, 80.0),
            (1, STEPPING, 90.0),
            (0, FINISHED, 100.0),
            (1, FINISHED, 100.0),
        ],
        {0: 4, 1: 4},
    )
    assert figures(lines, 500.0) == ((0.0, 100.0), 0.85, shares(failed=0.1, recovering=0.05), 1.0, 0.0)


def test_chips_weigh_goodput_but_not_uptime_and_not_blocked_seconds():
    lines = timelines(
        [(0, STEPPING, 0.0), (1, STEPPING, 0.0), (1, BLOCKED, 2.0), (1, STEPPING, 8.0)], {0: 1, 1: 3}
    )
    assert figures(lines, 10.0) == ((0.0, 10.0), 22 / 40, shares(blocked=18 / 40), 1.0, 6.0)


def test_before_the_first_step_nothing_is_allocated_and_nothing_lost():
    lines = timelines([(0, STARTING, 0.0), (1, RECOVERING, 5.0)])
    assert figures(lines, 50.0) == (None, 1.0, shares(), 1.0, 0.0)
    lines.enter(0, STEPPING, 60.0)
    assert figures(lines, 60.0) == ((60.0, 60.0), 1.0, shares(), 1.0, 0.0)


def test_compilation_before_a_learners_first_step_costs_nothing():
    lines = timelines([(0, STARTING, 0.0), (0, STEPPING, 30.0), (1, STARTING, 0.0), (1, STEPPING, 50.0)])
    assert figures(lines, 70.0) == ((30.0, 70.0), 1.0, shares(), 1.0, 0.0)


def test_a_start_after_a_death_costs_what_recovering_costs():
    lines = timelines([(0, STEPPING, 0.0), (0, FAILED, 4.0), (0, STARTING, 6.0), (0, STEPPING, 8.0)])
    assert figures(lines, 10.0) == ((0.0, 10.0), 0.6, shares(failed=0.2, recovering=0.2), 0.6, 0.0)


def test_recovery_before_the_window_opens_is_cut_at_its_opening():
    lines = timelines([(0, RECOVERING, 0.0), (1, STEPPING, 10.0), (0, STEPPING, 15.0)])
    assert figures(lines, 20.0) == ((10.0, 20.0), 0.75, shares(recovering=0.25), 1.0, 0.0)


def test_a_learner_that_died_before_it_ever_stepped_is_not_allocated():
    lines = timelines([(0, STEPPING, 0.0), (1, STARTING, 0.0), (1, FAILED, 3.0)])
    assert figures(lines, 10.0) == ((0.0, 10.0), 1.0, shares(), 1.0, 0.0)


def test_a_dead_learner_costs_until_the_last_of_the_others_leaves():
    lines = timelines([(0, STEPPING, 0.0), (1, STEPPING, 0.0), (1, FAILED, 5.0), (0, FINISHED, 10.0)])
    assert figures(lines, 99.0) == ((0.0, 10.0), 0.75, shares(failed=0.25), 1.0, 0.0)
    lines.enter(1, FINISHED, 50.0)
    assert figures(lines, 99.0) == ((0.0, 10.0), 0.75, shares(failed=0.25), 1.0, 0.0)


def test_the_window_stays_open_while_all_are_dead_and_none_has_finished():
    lines = timelines([(0, STEPPING, 0.0), (0, FAILED, 5.0)])
    assert figures(lines, 20.0) == ((0.0, 20.0), 0.25, shares(failed=0.75), 0.25, 0.0)


def test_a_learner_that_left_early_is_given_back():
    lines = timelines([(0, STEPPING, 0.0), (1, STEPPING, 0.0), (0, FINISHED, 5.0), (1, BLOCKED, 9.0)])
    assert figures(lines, 10.0) == ((0.0, 10.0), 14 / 15, shares(blocked=1 / 15), 0.9, 1.0)


def test_a_closed_window_opens_again_when_a_dead_learner_comes_back():
    lines = timelines([(0, STEPPING, 0.0), (1, STEPPING, 0.0), (1, FAILED, 5.0), (0, FINISHED, 10.0)])
    lines.enter(1, RECOVERING, 15.0)
    assert figures(lines, 20.0) == ((0.0, 20.0), 0.5, shares(failed=1 / 3, recovering=1 / 6), 0.5, 0.0)


def test_uptime_is_exactly_one_when_stepping_intervals_abut():
    times = [1.7e9 + third / 3 for third in range(8)]
    changes = []
    for turn, (start, end) in enumerate(itertools.pairwise(times)):
        changes += [(turn % 2, STEPPING, start), (turn % 2, BLOCKED, end)]
    lines = timelines(changes)
    lines.enter(0, FINISHED, times[-1])
    lines.enter(1, FINISHED, times[-1])
    assert lines.window(math.inf) == (times[0], times[-1])
    assert lines.uptime(times[-1]) == 1.0
    assert lines.goodput(times[-1]) < 1.0


def test_uptime_misses_the_gap_between_two_intervals():
    lines = timelines([(0, STEPPING, 0.0), (0, FAILED, 4.0), (1, STEPPING, 5.0)])
    assert lines.uptime(10.0) == 0.9


def test_a_question_about_the_past_is_answered_as_of_the_last_change():
    lines = timelines([(0, STEPPING, 0.0), (0, BLOCKED, 6.0), (0, STEPPING, 8.0)])
    assert figures(lines, 1.0) == figures(lines, 8.0)


def test_a_learner_is_alive_unless_it_is_dead():
    lines = Timelines({0: 1, 1: 1, 2: 1})
    assert lines.alive() == 3
    assert lines.state(0) is None
    for state in (STARTING, STEPPING, BLOCKED, RECOVERING, FINISHED):
        lines.enter(0, state, 1.0)
        assert (lines.alive(), lines.state(0)) == (3, state)
    lines.enter(1, FAILED, 2.0)
    assert (lines.alive(), lines.state(1)) == (2, FAILED)
    lines.enter(1, RECOVERING, 3.0)
    assert lines.alive() == 3


def test_what_cannot_be_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="learner 1: has 0 chips, but must have at least 1"):
        Timelines({0: 1, 1: 0})
    lines = timelines([(0, STEPPING, 5.0)])
    with pytest.raises(ValueError, match="learner 7: is unknown"):
        lines.enter(7, STEPPING, 6.0)
    for time in (4.0, math.nan):
        with pytest.raises(ValueError, match="learner 0: enters BLOCKED at"):
            lines.enter(0, BLOCKED, time)
    assert figures(lines, 9.0) == ((5.0, 9.0), 1.0, shares(), 1.0, 0.0)


class Counted:
    """The definitions of the documentation, counted for each second of histories of whole seconds."""

    def __init__(self, histories, chips, now):
        self.chips = chips
        self.intervals = {learner: self.effective(history) for learner, history in histories.items()}
        last = max((time for h in histories.values() for _, time in h), default=0)
        started = [t for spans in self.intervals.values() for s, t, _, _ in spans if s is STEPPING]
        self.window = None
        if started:
            active = [e for spans in self.intervals.values() for s, _, e, _ in spans if s in ACTIVE]
            states = {spans[-1][0] for spans in self.intervals.values() if spans}
            closed = FINISHED in states and not states & set(ACTIVE)
            self.window = (min(started), max(active) if closed else max(now, last))

    @staticmethod
    def effective(history):
        """(state, start, end, allocated) each; the last one ends never."""
        spans, allocated = [], False
        ends = [*[time for _, time in history[1:]], math.inf][: len(history)]
        for (state, start), end in zip(history, ends, strict=True):
            state = RECOVERING if state is STARTING and allocated else state
            allocated = state is not FINISHED and (allocated or state in (STEPPING, RECOVERING))
            spans.append((state, start, end, allocated))
        return spans

    def figures(self):
        seconds = {state: dict.fromkeys(self.chips, 0) for state in (STEPPING, *CAUSES)}
        up = 0
        opened, closed = self.window or (0, 0)
        for second in range(opened, closed):
            now = {
                learner: state
                for learner, spans in self.intervals.items()
                for state, start, end, allocated in spans
                if start <= second < end and allocated
            }
            up += STEPPING in now.values()
            for learner, state in now.items():
                seconds[state][learner] += 1
        chip_seconds = {
            state: sum(self.chips[learner] * n for learner, n in by_learner.items())
            for state, by_learner in seconds.items()
        }
        allocated = sum(chip_seconds.values())
        lost = {cause.value: chip_seconds[cause] / allocated if allocated else 0.0 for cause in CAUSES}
        goodput = chip_seconds[STEPPING] / allocated if allocated else 1.0
        uptime = up / (closed - opened) if closed > opened else 1.0
        return self.window, goodput, lost, uptime, sum(seconds[BLOCKED].values())


@st.composite
def runs(draw):
    """Histories of up to four learners, their chips, an order of telling, and a time to ask about."""
    learners = range(draw(st.integers(1, 4)))
    change = st.tuples(st.sampled_from(State), st.integers(0, 6))
    histories = {}
    for learner in learners:
        time, history = 0, []
        for state, pause in draw(st.lists(change, max_size=7)):
            time += pause
            history.append((state, time))
        histories[learner] = history
    chips = {learner: draw(st.integers(1, 9)) for learner in learners}
    order = draw(st.permutations([learner for learner, history in histories.items() for _ in history]))
    return histories, chips, order, draw(st.integers(0, 60))


@settings(deadline=None, max_examples=400)
@given(runs())
def test_any_history_told_in_any_order_gives_the_figures_counted_by_seconds(run):
    histories, chips, order, now = run
    rest = {learner: iter(history) for learner, history in histories.items()}
    lines = timelines([(learner, *next(rest[learner])) for learner in order], chips)
    assert figures(lines, now) == Counted(histories, chips, now).figures()


@settings(deadline=None, max_examples=200)
@given(runs(), st.floats(1e-3, 1e3), st.floats(0.0, 2e9))
def test_shares_of_real_times_add_up_to_one_and_stay_between_nothing_and_all(run, unit, origin):
    histories, chips, order, now = run
    rest = {learner: iter(history) for learner, history in histories.items()}
    lines = Timelines(chips)
    for learner in order:
        state, time = next(rest[learner])
        lines.enter(learner, state, origin + unit * time)
        asked = origin + unit * now
        lost = lines.lost(asked)
        assert 0.0 <= lines.goodput(asked) <= 1.0
        assert 0.0 <= lines.uptime(asked) <= 1.0
        assert all(0.0 <= share <= 1.0 for share in lost.values())
        assert lines.goodput(asked) + sum(lost.values()) == pytest.approx(1.0, abs=1e-12)
        assert lines.blocked_seconds(asked) >= 0.0
