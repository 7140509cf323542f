"""What befalls one learner in virtual time: pauses, fewer chips, hangs, death, coming and going."""

import dataclasses

import pytest

from ddiloco.goodput.accounting import State
from ddiloco.protocol import events
from ddiloco.virtual.array_ports import CountingLearner
from ddiloco.virtual.availability import PAUSES, Change
from ddiloco.virtual.links import LinkQuality
from tests.virtual.small_fleet import BOTH, CHIPS, ONE, TOKENS, TWO, played, run, small_fleet

IMPATIENT = dataclasses.replace(BOTH, offer_timeout=3.0, silence_timeout=8.0, resend_timeout=2.0)


@pytest.mark.parametrize("event", PAUSES)
def test_a_pause_puts_a_step_off_by_exactly_the_pause_and_is_told_as_what_it_is(event):
    told = played(ONE, 4, changes=[Change(1.25, 0, event), Change(4.5, 0, "step")])
    assert told.step_ends(0) == [1.0, 5.25, 6.25, 7.25]
    assert told.states(0)[2:4] == [(1.25, PAUSES[event]), (4.5, State.STEPPING)]


@pytest.mark.parametrize("event", PAUSES)
def test_chips_that_a_learner_has_given_back_are_nobodys_pause(event):
    free = dataclasses.replace(BOTH, max_run_ahead=None)
    told = played(free, 8, seconds=(1.0, 4.0), changes=[Change(10.0, 0, event)])
    assert told.states(0)[-1] == (8.0, State.FINISHED)
    assert told.states(1)[-1][0] >= 32.0


def test_at_half_its_chips_a_learner_takes_twice_as_long_also_for_the_rest_of_a_step():
    changes = [Change(1.5, 0, "step", 0.5), Change(5.0, 0, "step", 1.0)]
    told = played(ONE, 5, changes=changes)
    # Half a step is left at 1.5 and takes 1 s; then one of 2 s; at 5.0 a quarter is done, 0.75 s are left.
    assert told.step_ends(0) == [1.0, 2.5, 4.5, 5.75, 6.75]
    chips = [(time, count) for time, _, state, count in told.of("state") if state is State.STEPPING]
    assert chips == [(0.0, CHIPS), (1.5, CHIPS // 2), (5.0, CHIPS)]


def test_a_pause_that_ends_on_fewer_chips_slows_what_is_left():
    changes = [Change(1.5, 0, "detect"), Change(10.0, 0, "step", 0.25)]
    told = played(ONE, 3, changes=changes)
    assert told.step_ends(0) == [1.0, 12.0, 16.0]


def test_an_update_that_comes_in_a_pause_is_found_when_it_ends():
    changes = [Change(4.25, 0, "detect"), Change(9.0, 0, "step")]
    told = played(ONE, 8, changes=changes, merge_seconds=1.0)
    assert told.of("merge")[0] == (5.0, 4, 1)
    assert told.of("update")[0] == (9.0, 0, 1)


def test_an_offer_leaves_with_the_report_of_its_step_whatever_befalls_the_learner_then():
    quality = LinkQuality(latency=0.5)
    changes = [Change(5.25, 0, "detect"), Change(30.0, 0, "step")]
    told = played(ONE, 8, quality=quality, changes=changes)
    # Joined at 0.5, welcomed at 1; asked for at 2.5, when step 2 is reported; step 4 ends at 5.
    assert told.of("merge")[0] == (5.5, 4, 1)


def hung(seconds, total_steps):
    """A fleet of two that wait for each other; learner 1 hangs at 4.75, in the step that it is to offer."""
    fleet, told = small_fleet(IMPATIENT, total_steps, quality=LinkQuality(latency=0.5))
    fleet.calendar.at(4.75, lambda: fleet.processes[1].hang(seconds))
    run(fleet)
    return told


def test_who_hangs_offers_nothing_is_silent_and_the_rounds_go_on_without_it():
    told = hung(100.0, 12)
    silent_at = 4.5 + IMPATIENT.silence_timeout  # step 3 was heard of at 4.5
    assert told.of("learner_silent") == [(silent_at, {"learner": 1})]
    assert told.of("merge")[0] == (silent_at, 4, 1)
    assert [values["learners"] for _, values in told.of("round")] == [[0], [0], [0]]
    assert told.states(1)[-1] == (4.75, State.DETECTING)


def test_after_a_hang_a_learner_counts_again():
    told = hung(20.0, 40)
    [(back, values)] = told.of("learner_returned")
    assert values == {"learner": 1}
    assert 24.75 < back < 24.75 + 2
    assert told.of("round")[-1][1]["learners"] == [0, 1]
    assert told.states(1)[-1][1] is State.FINISHED
    assert not told.of("learner_lost")


def test_a_second_hang_within_the_first_counts_from_its_own_start():
    fleet, told = small_fleet(ONE, 2)
    for time in (0.25, 1.25):
        fleet.calendar.at(time, lambda: fleet.processes[0].hang(2.0))
    run(fleet)
    assert told.step_ends(0) == [4.0, 5.0]


@pytest.mark.parametrize(("pause", "resume", "end"), [(1.5, 9.0, 9.75), (1.125, 2.0, 5.125), (1.5, 2.0, 5.0)])
def test_a_learner_both_paused_and_hung_steps_on_when_both_have_ended(pause, resume, end):
    changes = [Change(pause, 0, "reconfigure"), Change(resume, 0, "step")]
    fleet, told = small_fleet(ONE, 2, changes=changes)
    fleet.calendar.at(1.25, lambda: fleet.processes[0].hang(3.0))
    run(fleet)
    assert told.step_ends(0) == [1.0, end]


class Losing(CountingLearner):
    """Counts how often its memory was lost, and what it was given again."""

    def __init__(self):
        super().__init__(lambda: TOKENS)
        self.lost, self.adopted, self.steps = 0, 0, 0

    def adopt(self, fragments, inner=None):
        self.adopted += 1

    def step(self, clock):
        self.steps += 1
        return super().step(clock)

    def lose(self):
        self.lost += 1


def test_a_death_loses_memory_and_step_and_its_return_begins_anew_under_another_incarnation():
    made = []

    def arrays(learner):
        made.append((learner, Losing()))
        return made[-1][1]

    changes = [Change(2.5, 1, "fail"), Change(8.0, 1, "recover")]
    told = played(TWO, 24, changes=changes, notice=2.0, recovery=4.0, learner_arrays=arrays)
    first, second = [each for learner, each in made if learner == 1]
    assert (first.lost, first.adopted, first.steps) == (1, 1, 3)  # the third was under way
    assert (second.lost, second.adopted) == (0, 1)
    assert told.step_ends(1)[:3] == [1.0, 2.0, 13.0]
    lost = {"learner": 1, "incarnation": 1, "reason": "died"}
    assert told.of("learner_lost") == [(4.5, lost)]
    ready = [(time, values) for time, values in told.of("learner_ready") if values["learner"] == 1]
    assert [time for time, _ in ready] == [0.0, 12.0]
    assert ready[1][1]["incarnation"] > ready[0][1]["incarnation"]
    assert told.states(1)[2:6] == [
        (2.5, State.FAILED),
        (8.0, State.RECONFIGURING),
        (12.0, State.STARTING),
        (12.0, State.STEPPING),
    ]


def test_a_returning_learner_goes_on_at_the_syncers_clock():
    changes = [Change(2.5, 1, "fail"), Change(8.0, 1, "recover")]
    told = played(TWO, 24, changes=changes, notice=1.0, recovery=4.5)
    taken = [(time, clock) for time, learner, clock, _ in told.of("step") if learner == 1]
    assert taken[:4] == [(1.0, 1), (2.0, 2), (13.5, 13), (14.5, 14)]  # step 12 was merged at 12.0


def test_until_its_death_is_noticed_a_learner_is_waited_for():
    told = played(BOTH, 8, changes=[Change(3.5, 1, "fail")], notice=7.0)
    assert told.step_ends(0)[:5] == [1.0, 2.0, 3.0, 4.0, 11.5]
    assert (4.0, State.WAITING_FOR_PEERS) in told.states(0)
    assert told.of("round")[0][1]["learners"] == [0]


def test_a_leave_within_recovery_is_a_leave():
    changes = [Change(2.5, 1, "fail"), Change(4.0, 1, "recover"), Change(6.0, 1, "leave")]
    told = played(TWO, 24, changes=changes, recovery=5.0)
    assert told.step_ends(1) == [1.0, 2.0]
    assert told.states(1)[-1] == (6.0, State.FINISHED)
    assert [values["learner"] for _, values in told.of("learner_ready")] == [0, 1]


def test_a_death_within_recovery_is_a_death():
    changes = [Change(2.5, 1, "fail"), Change(4.0, 1, "recover"), Change(6.0, 1, "fail")]
    told = played(TWO, 24, changes=[*changes, Change(8.0, 1, "recover")], recovery=5.0)
    assert told.states(1)[2:6] == [
        (2.5, State.FAILED),
        (4.0, State.RECONFIGURING),
        (6.0, State.FAILED),
        (8.0, State.RECONFIGURING),
    ]
    assert told.step_ends(1)[:3] == [1.0, 2.0, 14.0]


@pytest.mark.parametrize(("resumed", "ends"), [(10.0, [15.0, 17.0]), (20.0, [22.0, 24.0])])
def test_what_befalls_a_learner_while_it_starts_holds_from_its_first_step_on(resumed, ends):
    changes = [Change(2.5, 1, "fail"), Change(8.0, 1, "recover"), Change(8.0, 1, "reconfigure")]
    changes.append(Change(resumed, 1, "step", 0.5))
    told = played(TWO, 40, changes=changes, recovery=5.0)
    assert [time for time in told.step_ends(1) if time > 2.0][:2] == ends
    stepping = [
        (time, chips) for time, m, state, chips in told.of("state") if m == 1 and state is State.STEPPING
    ]
    assert stepping[1] == (ends[0] - 2.0, CHIPS // 2)


def test_a_learner_that_recovers_starts_on_all_its_chips():
    changes = [Change(1.5, 1, "step", 0.5), Change(1.5, 1, "detect"), Change(2.5, 1, "fail")]
    told = played(TWO, 24, changes=[*changes, Change(4.0, 1, "recover")], recovery=1.0, notice=0.0)
    assert told.step_ends(1)[:3] == [1.0, 6.0, 7.0]


def test_who_leaves_says_so_gives_back_its_chips_and_is_not_waited_for():
    told = played(BOTH, 8, changes=[Change(3.5, 1, "leave")], notice=1000.0)
    assert told.of("learner_lost") == [(3.5, {"learner": 1, "incarnation": 1, "reason": events.LEFT})]
    assert told.step_ends(0) == [float(n) for n in range(1, 9)]
    assert told.states(1)[-1] == (3.5, State.FINISHED)


def test_what_befalls_somebody_who_is_not_there_changes_nothing():
    changes = [Change(5.0, 1, "join")]
    fleet, told = small_fleet(TWO, 12, changes=changes, recovery=0.0)
    for change in ("detect", "step"):
        fleet.calendar.at(1.0, fleet._apply_change, Change(1.0, 1, change))
    fleet.calendar.at(2.0, fleet.fail, 1)
    run(fleet)
    assert told.states(1)[0] == (5.0, State.RECONFIGURING)
    assert not told.of("learner_lost")
