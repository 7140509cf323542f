"""What the records of a run add up to."""

import math

import pytest

from ddiloco.goodput.accounting import State
from ddiloco.observe.records import LearnerDied, Noted, StateChanged, StepDone
from ddiloco.observe.tally import Tally


@pytest.fixture
def tally(run_info):
    return Tally(run_info(3), None)


def step(learner, number, **metrics):
    return StepDone(learner, number, float(number), 10, metrics)


def enter(tally, learner, *states, time=0.0):
    for state in states:
        tally.state_changed(StateChanged(learner, state, time))


def note(tally, name, **values):
    tally.noted(Noted(name, values, 0.0))


def test_a_learner_that_goes_on_after_finishing_has_not_finished(tally):
    enter(tally, 0, State.STEPPING, State.FINISHED, State.STEPPING)
    assert tally.finished == set()


def test_a_clock_that_was_set_back_loses_no_state(tally):
    enter(tally, 0, State.STEPPING, time=10.0)
    enter(tally, 0, State.WAITING_FOR_PEERS, time=8.0)
    enter(tally, 0, State.STEPPING, time=9.0)
    enter(tally, 0, State.FINISHED, time=12.0)
    assert tally.timelines.window(99.0) == (10.0, 12.0)
    assert tally.timelines.goodput(99.0) == 1.0


def test_several_records_of_one_death_leave_one_mark_and_so_does_the_return(tally):
    tally.step_done(step(1, 2, loss=1.0))
    enter(tally, 1, State.STEPPING, State.FAILED)
    tally.died(LearnerDied(1, 5.0, "gone"))
    note(tally, "learner_silent", learner=1)
    note(tally, "learner_lost", learner=1)
    tally.step_done(step(0, 3, loss=1.0))
    note(tally, "learner_ready", learner=1)
    note(tally, "learner_returned", learner=1)
    assert tally.marks == [(2, 1, False), (3, 1, True)]
    assert tally.away == set() and len(tally.failures) == 1


def test_goodput_falls_while_learners_are_gone_and_not_yet_replaced(tally):
    enter(tally, 0, State.STEPPING)
    tally.noted(Noted("learner_silent", {"learner": 0}, 5.0))
    assert tally.timelines.alive(1) == (0, 1)
    tally.noted(Noted("learner_returned", {"learner": 0}, 9.0))
    assert tally.timelines.alive(1) == (1, 1)


def test_first_arrivals_and_the_departure_of_those_that_finished_leave_no_mark(tally):
    note(tally, "learner_ready", learner=0)
    enter(tally, 0, State.STEPPING, State.FINISHED)
    note(tally, "learner_silent", learner=0)
    note(tally, "learner_lost", learner=0)
    assert tally.marks == []


def test_a_skipped_step_is_a_step_without_tokens_or_loss(tally):
    assert tally.step_done(step(0, 1, loss=2.0, skipped=0)) == 2.0
    assert tally.step_done(step(0, 2, loss=math.nan, skipped=1)) is None
    assert tally.step_done(step(0, 3)) is None
    assert (tally.counts["skipped_steps"], tally.tokens, tally.steps_by_learner[0]) == (1, 20, 3)
    assert tally.train_loss() == 2.0


def test_the_training_loss_is_the_mean_over_learners_of_the_end_of_each(tally):
    for number in range(1, 101):
        tally.step_done(step(0, number, loss=float(number)))
    tally.step_done(step(1, 1, loss=8.0))
    assert tally.train_loss() == ((96 + 97 + 98 + 99 + 100) / 5 + 8.0) / 2


@pytest.mark.parametrize("goes", ["dies", "is lost", "leaves"])
def test_a_learner_that_went_early_has_no_part_in_the_training_loss_until_it_is_back(tally, goes):
    for learner, loss in ((0, 2.0), (1, 9.0)):
        enter(tally, learner, State.STEPPING)
        tally.step_done(step(learner, 2, loss=loss))
    assert tally.train_loss() == 5.5
    match goes:
        case "is lost":
            note(tally, "learner_lost", learner=1)
        case _:
            enter(tally, 1, State.FAILED if goes == "dies" else State.FINISHED)
    assert tally.train_loss() == 5.5
    tally.step_done(step(0, 4, loss=3.0))
    assert tally.train_loss() == 3.0
    enter(tally, 1, State.STEPPING)
    note(tally, "learner_ready", learner=1)
    assert tally.train_loss() == 6.0


def test_the_recent_loss_is_the_mean_of_ten_steps_of_each_learner_and_says_when_it_is_lost(tally):
    assert tally.recent_loss is None
    for number in range(50):
        tally.step_done(step(number % 3, number, loss=float(number)))
    assert tally.recent_loss == sum(range(20, 50)) / 30
    tally.step_done(step(0, 50, loss=math.nan))
    assert math.isnan(tally.recent_loss)
    tally.step_done(step(0, 51, loss=51.0))
    assert tally.recent_loss == (sum(range(22, 50)) + 51) / 29


def test_the_global_step_is_the_furthest_clock_of_any_learner(tally):
    for learner, number in ((0, 1), (1, 3), (0, 2)):
        tally.step_done(step(learner, number))
    assert tally.step == 3
    tally.step_done(step(0, 1 << 52))
    assert tally.step == tally.info.total_steps


def test_a_round_that_cannot_be_read_is_not_half_counted(tally):
    with pytest.raises(KeyError):
        note(tally, "round", fragment=0, grace_seconds=1.0)
    rounds = tally.rounds
    assert (rounds.count, rounds.mean_quorum(), rounds.by_fragment.total()) == (0, None, 0)


def test_records_of_names_to_come_change_nothing(tally):
    note(tally, "something_new", learner=0)
    assert (tally.marks, tally.drops.total(), tally.rounds.count) == ([], 0, 0)


def test_a_learner_that_lost_chips_is_charged_for_them(tally):
    chips = tally.info.chips_by_learner[0]
    assert chips > 1
    tally.state_changed(StateChanged(0, State.STEPPING, 0.0))
    tally.state_changed(StateChanged(0, State.STEPPING, 5.0, chips - 1))
    assert tally.timelines.goodput(10.0) == 1 - 0.5 / chips


def merge(tally, fragment, *given):
    contributions = [[learner, 1, 0, 4, 1, tokens] for learner, tokens in given]
    note(tally, "round", step=4, fragment=fragment, quorum=len(given), contributions=contributions)


def trained(run_info, shares, rounds=4):
    """Three learners on two fragments, 40 tokens each, of which these shares are merged."""
    tally = Tally(run_info(3, num_fragments=2), None)
    for learner in range(3):
        for number in range(1, 5):
            tally.step_done(step(learner, number))
    for _ in range(rounds):
        for fragment in (0, 1):
            merge(tally, fragment, *((m, 40 * share / rounds) for m, share in enumerate(shares)))
    return tally


def test_the_merged_share_is_of_the_tokens_trained_averaged_over_fragments(run_info):
    tally = trained(run_info, (0.9, 0.8, 0.1))
    assert tally.merged_shares() == pytest.approx({0: 0.9, 1: 0.8, 2: 0.1})
    assert tally.merged_share() == pytest.approx(0.6)


def test_without_merges_there_is_no_share(run_info):
    tally = trained(run_info, (), rounds=0)
    assert (tally.merged_share(), tally.merged_shares(), tally.left_out()) == (None, {}, {})


def test_a_learner_below_half_of_the_median_is_left_out_unless_it_is_away_new_or_it_is_too_early(run_info):
    assert trained(run_info, (0.9, 0.8, 0.1)).left_out() == pytest.approx({2: 0.1})
    assert trained(run_info, (0.9, 0.8, 0.5)).left_out() == {}
    assert trained(run_info, (0.9, 0.8, 0.1), rounds=3).left_out() == {}
    away = trained(run_info, (0.9, 0.8, 0.1))
    note(away, "learner_silent", learner=2)
    assert away.left_out() == {}
    new = trained(run_info, (0.9, 0.8, 0.1))
    for number in range(5, 30):
        new.step_done(step(0, number))
    assert 2 not in new.left_out()
