"""Goodput, uptime and lost time: worked examples, and any history against a count second by second."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.goodput.accounting import ACTIVE, CAUSES, MAX_UNCUT, State, Timelines
from tests.long import times

STARTING, STEPPING, WAITING = State.STARTING, State.STEPPING, State.WAITING_FOR_PEERS
RECONFIGURING, STANDBY = State.RECONFIGURING, State.STANDBY
FAILED, FINISHED = State.FAILED, State.FINISHED


def timelines(changes, chips=None):
    """Timelines after `changes`: (learner, state, time[, chips]) each; one chip a learner unless told."""
    lines = Timelines(chips or dict.fromkeys({learner for learner, *_ in changes}, 1))
    for learner, *change in changes:
        lines.enter(learner, *change)
    return lines


def figures(lines, now):
    return (
        lines.window(now),
        lines.goodput(now),
        lines.lost(now),
        lines.uptime(now),
        lines.blocked_seconds(now),
    )


def shares(**lost):
    return {cause.value: lost.get(cause.value, 0.0) for cause in CAUSES}


def test_uptime_is_exactly_one_when_stepping_intervals_abut():
    times = [1.7e9 + third / 3 for third in range(8)]
    changes = []
    for turn, (start, end) in enumerate(itertools.pairwise(times)):
        changes += [(turn % 2, STEPPING, start), (turn % 2, WAITING, end)]
    lines = timelines(changes)
    lines.enter(0, FINISHED, times[-1])
    lines.enter(1, FINISHED, times[-1])
    assert lines.window(math.inf) == (times[0], times[-1])
    assert lines.uptime(times[-1]) == 1.0
    assert lines.goodput(times[-1]) < 1.0


def test_a_learner_is_alive_unless_it_is_dead():
    lines = Timelines({0: 1, 1: 1, 2: 1})
    assert lines.alive(3) == (3, 3)
    for state in (STARTING, STEPPING, WAITING, RECONFIGURING, FINISHED):
        lines.enter(0, state, 1.0)
        assert lines.alive(3) == (3, 3)
    lines.enter(1, FAILED, 2.0)
    assert lines.alive(3) == (2, 3)
    lines.enter(1, RECONFIGURING, 3.0)
    assert lines.alive(3) == (3, 3)


def test_who_is_away_counts_as_dead_until_it_says_what_it_did():
    lines = timelines([(0, STEPPING, 0.0), (1, STEPPING, 0.0)])
    for learner, since in ((0, 4.0), (1, 6.0)):
        lines.away(learner, since)
    assert lines.alive(2) == (0, 2)
    assert figures(lines, 10.0) == ((0.0, 10.0), 0.5, shares(failed=0.5), 0.6, 0.0)
    lines.away(0, math.inf)  # it stepped on behind a broken connection
    assert figures(lines, 10.0) == ((0.0, 10.0), 0.8, shares(failed=0.2), 1.0, 0.0)
    lines.enter(1, WAITING, 7.0)  # and so did the other one for a second
    assert lines.alive(2) == (2, 2)
    assert figures(lines, 10.0) == ((0.0, 10.0), 0.85, shares(waiting_for_peers=0.15), 1.0, 3.0)


def test_who_hangs_until_it_is_killed_was_dead_since_it_fell_silent():
    lines = timelines([(0, STEPPING, 0.0), (1, STEPPING, 0.0)])
    lines.away(1, 4.0)
    before = figures(lines, 10.0)
    lines.enter(1, FAILED, 9.0)
    assert figures(lines, 10.0) == before == ((0.0, 10.0), 0.7, shares(failed=0.3), 1.0, 0.0)
    lines.enter(1, RECONFIGURING, 10.0)
    assert figures(lines, 10.0) == before


def test_a_learner_beyond_those_that_the_run_begins_with_counts_once_it_has_come():
    lines = Timelines(dict.fromkeys(range(4), 1))
    assert lines.alive(2) == (2, 2)
    lines.enter(3, STEPPING, 1.0)
    assert lines.alive(2) == (3, 3)
    for learner in (0, 1, 3):
        lines.enter(learner, FAILED, 2.0)
    assert lines.alive(2) == (0, 3)


def test_a_learner_that_never_steps_and_changes_without_end_takes_no_more_memory():
    lines = Timelines({0: 1, 1: 1})
    for n in range(3 * MAX_UNCUT):
        lines.enter(1, (State.RECONFIGURING, State.STANDBY)[n % 2], float(n))
    assert len(lines._tracks[1].uncut) == MAX_UNCUT


def test_what_cannot_be_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="learner 1: has 0 chips, but must have at least 1"):
        Timelines({0: 1, 1: 0})
    lines = timelines([(0, STEPPING, 5.0)])
    with pytest.raises(ValueError, match="learner 7: is unknown"):
        lines.enter(7, STEPPING, 6.0)
    for time in (4.0, math.nan):
        with pytest.raises(ValueError, match="learner 0: enters WAITING_FOR_PEERS at"):
            lines.enter(0, WAITING, time)
    with pytest.raises(ValueError, match="learner 0: enters STEPPING with 0 chips, but may with 1 to 1"):
        lines.enter(0, STEPPING, 6.0, 0)
    with pytest.raises(ValueError, match="learner 0: enters DETECTING with 2 chips, but may with 0 to 1"):
        lines.enter(0, State.DETECTING, 6.0, 2)
    assert figures(lines, 9.0) == ((5.0, 9.0), 1.0, shares(), 1.0, 0.0)


class Counted:
    """The definitions of the documentation, counted for each second of histories of whole seconds."""

    def __init__(self, histories, chips, now):
        self.chips = chips
        self.intervals = {learner: self.effective(history) for learner, history in histories.items()}
        last = max((time for h in histories.values() for _, time, _ in h), default=0)
        started = [t for spans in self.intervals.values() for s, t, *_ in spans if s is STEPPING]
        self.window = None
        if started:
            active = [e for spans in self.intervals.values() for s, _, e, *_ in spans if s in ACTIVE]
            states = {spans[-1][0] for spans in self.intervals.values() if spans}
            closed = FINISHED in states and not states & set(ACTIVE)
            self.window = (min(started), max(active) if closed else max(now, last))

    @staticmethod
    def effective(history):
        """(state, start, end, allocated, chips in the job) each; the last one ends never."""
        spans, allocated = [], False
        ends = [*[time for _, time, _ in history[1:]], math.inf][: len(history)]
        for (state, start, present), end in zip(history, ends, strict=True):
            state = RECONFIGURING if state is STARTING and allocated else state
            paid_from = (STEPPING, RECONFIGURING, STANDBY)
            allocated = state is not FINISHED and (allocated or state in paid_from)
            spans.append((state, start, end, allocated, present))
        return spans

    def figures(self):
        chip_seconds = dict.fromkeys((STEPPING, *CAUSES), 0)
        up = waited = 0
        opened, closed = self.window or (0, 0)
        for second in range(opened, closed):
            now = {
                learner: (state, present)
                for learner, spans in self.intervals.items()
                for state, start, end, allocated, present in spans
                if start <= second < end and allocated
            }
            states = [state for state, _ in now.values()]
            up += STEPPING in states
            waited += states.count(WAITING) + states.count(State.WAITING_FOR_NETWORK)
            for learner, (state, present) in now.items():
                chip_seconds[state] += present
                chip_seconds[FAILED] += self.chips[learner] - present
        allocated = sum(chip_seconds.values())
        lost = {cause.value: chip_seconds[cause] / allocated if allocated else 0.0 for cause in CAUSES}
        goodput = chip_seconds[STEPPING] / allocated if allocated else 1.0
        uptime = up / (closed - opened) if closed > opened else 1.0
        return self.window, goodput, lost, uptime, waited


@st.composite
def runs(draw):
    """Histories of up to four learners, their chips, an order of telling, and a time to ask about."""
    learners = range(draw(st.integers(1, 4)))
    chips = {learner: draw(st.integers(1, 9)) for learner in learners}
    histories = {}
    for learner in learners:
        present = st.integers(1, chips[learner])
        change = st.tuples(st.sampled_from(State), st.integers(0, 6), present)
        time, history = 0, []
        for state, pause, in_job in draw(st.lists(change, max_size=7)):
            time += pause
            history.append((state, time, in_job))
        histories[learner] = history
    order = draw(st.permutations([learner for learner, history in histories.items() for _ in history]))
    return histories, chips, order, draw(st.integers(0, 60))


@settings(max_examples=times(60, 400))
@given(runs())
def test_any_history_told_in_any_order_gives_the_figures_counted_by_seconds(run):
    histories, chips, order, now = run
    rest = {learner: iter(history) for learner, history in histories.items()}
    lines = timelines([(learner, *next(rest[learner])) for learner in order], chips)
    assert figures(lines, now) == Counted(histories, chips, now).figures()


@settings(max_examples=times(40, 200))
@given(runs(), st.floats(1e-3, 1e3), st.floats(0.0, 2e9))
def test_shares_of_real_times_add_up_to_one_and_stay_between_nothing_and_all(run, unit, origin):
    histories, chips, order, now = run
    rest = {learner: iter(history) for learner, history in histories.items()}
    lines = Timelines(chips)
    for learner in order:
        state, time, present = next(rest[learner])
        lines.enter(learner, state, origin + unit * time, present)
        asked = origin + unit * now
        lost = lines.lost(asked)
        assert 0.0 <= lines.goodput(asked) <= 1.0
        assert 0.0 <= lines.uptime(asked) <= 1.0
        assert all(0.0 <= share <= 1.0 for share in lost.values())
        assert lines.goodput(asked) + sum(lost.values()) == pytest.approx(1.0, abs=1e-12)
        assert lines.blocked_seconds(asked) >= 0.0


def test_the_time_of_a_skipped_step_is_lost_from_the_end_of_the_step_before():
    lines = timelines([(0, STEPPING, 0.0), (1, STEPPING, 0.0)], {0: 4, 1: 4})
    lines.step_ended(0, 10.0, skipped=False)
    lines.step_ended(0, 15.0, skipped=True)
    lines.step_ended(1, 20.0, skipped=False)
    assert figures(lines, 20.0) == ((0.0, 20.0), 0.875, shares(skipping=0.125), 1.0, 0.0)


def test_so_is_all_of_a_step_that_was_interrupted_and_no_more():
    lines = timelines([(0, STEPPING, 0.0)])
    lines.step_ended(0, 2.0, skipped=False)
    for state, time in ((WAITING, 5.0), (STEPPING, 6.0)):
        lines.enter(0, state, time)
    lines.step_ended(0, 8.0, skipped=True)
    lines.enter(0, FINISHED, 10.0)
    lost = shares(skipping=0.5, waiting_for_peers=0.1)
    assert figures(lines, 50.0) == ((0.0, 10.0), pytest.approx(0.4), lost, pytest.approx(0.9), 1.0)


def test_a_step_of_a_job_is_one_of_all_its_chips_that_step():
    lines = timelines([(0, STEPPING, 0.0), (1, STEPPING, 0.0), (2, STANDBY, 0.0)])
    lines.job_step_ended(10.0, skipped=True)
    assert lines.goodput(10.0) == 0.0
    assert lines.lost(10.0) == pytest.approx(shares(skipping=2 / 3, standby=1 / 3))
