"""What the records of a run add up to."""

import math

import pytest

from ddiloco.goodput.accounting import State
from ddiloco.telemetry.records import LearnerDied, Noted, StateChanged, StepDone
from ddiloco.telemetry.state import RunState


@pytest.fixture
def state(run_info):
    return RunState(run_info(3), None)


def step(learner, number, **metrics):
    return StepDone(learner, number, float(number), 10, metrics)


def enter(state, learner, *entered, time=0.0):
    for one in entered:
        state.apply(StateChanged(learner, one, time))


def note(state, name, **values):
    state.apply(Noted(name, values, 0.0))


def test_a_clock_that_was_set_back_loses_no_state(state):
    enter(state, 0, State.STEPPING, time=10.0)
    enter(state, 0, State.WAITING_FOR_PEERS, time=8.0)
    enter(state, 0, State.STEPPING, time=9.0)
    enter(state, 0, State.FINISHED, time=12.0)
    assert state.timelines.window(99.0) == (10.0, 12.0)
    assert state.timelines.goodput(99.0) == 1.0


def test_several_records_of_one_death_leave_one_mark_and_so_does_the_return(state):
    state.apply(step(1, 2, loss=1.0))
    enter(state, 1, State.STEPPING, State.FAILED)
    state.apply(LearnerDied(1, 5.0, "gone"))
    note(state, "learner_silent", learner=1)
    note(state, "learner_lost", learner=1)
    state.apply(step(0, 3, loss=1.0))
    note(state, "learner_ready", learner=1)
    note(state, "learner_returned", learner=1)
    assert state.marks == [(2, 1, False), (3, 1, True)]
    assert state.away == set() and len(state.failures) == 1


def test_first_arrivals_and_the_departure_of_those_that_finished_leave_no_mark(state):
    note(state, "learner_ready", learner=0)
    enter(state, 0, State.STEPPING, State.FINISHED)
    note(state, "learner_silent", learner=0)
    note(state, "learner_lost", learner=0)
    assert state.marks == []


def test_a_skipped_step_is_a_step_without_tokens_or_loss(state):
    state.apply(step(0, 1, loss=2.0, skipped=0))
    state.apply(step(0, 2, loss=math.nan, skipped=1))
    state.apply(step(0, 3))
    assert (state.counts["skipped_steps"], state.tokens, state.learners[0].steps) == (1, 20, 3)
    assert state.train_loss() == 2.0


def test_the_training_loss_is_the_mean_over_learners_of_the_end_of_each(state):
    for number in range(1, 101):
        state.apply(step(0, number, loss=float(number)))
    state.apply(step(1, 1, loss=8.0))
    assert state.train_loss() == ((96 + 97 + 98 + 99 + 100) / 5 + 8.0) / 2


@pytest.mark.parametrize("goes", ["dies", "is lost", "leaves"])
def test_a_learner_that_went_early_has_no_part_in_the_training_loss_until_it_is_back(state, goes):
    for learner, loss in ((0, 2.0), (1, 9.0)):
        enter(state, learner, State.STEPPING)
        state.apply(step(learner, 2, loss=loss))
    assert state.train_loss() == 5.5
    match goes:
        case "is lost":
            note(state, "learner_lost", learner=1)
        case _:
            enter(state, 1, State.FAILED if goes == "dies" else State.FINISHED)
    assert state.train_loss() == 5.5
    state.apply(step(0, 4, loss=3.0))
    assert state.train_loss() == 3.0
    enter(state, 1, State.STEPPING)
    note(state, "learner_ready", learner=1)
    assert state.train_loss() == 6.0


def test_the_recent_loss_is_the_mean_of_ten_steps_of_each_learner_and_says_when_it_is_lost(state):
    assert state.recent_loss is None
    for number in range(50):
        state.apply(step(number % 3, number, loss=float(number)))
    assert state.recent_loss == sum(range(20, 50)) / 30
    state.apply(step(0, 50, loss=math.nan))
    assert math.isnan(state.recent_loss)
    state.apply(step(0, 51, loss=51.0))
    assert state.recent_loss == (sum(range(22, 50)) + 51) / 29


def test_the_global_step_is_the_furthest_clock_of_any_learner(state):
    for learner, number in ((0, 1), (1, 3), (0, 2)):
        state.apply(step(learner, number))
    assert state.step == 3
    state.apply(step(0, 1 << 52))
    assert state.step == state.info.total_steps


def test_a_round_that_cannot_be_read_is_not_half_counted(state):
    with pytest.raises(KeyError):
        note(state, "round", fragment=0, grace_seconds=1.0)
    rounds = state.rounds
    assert (rounds.count, rounds.mean_quorum(), rounds.by_fragment.total()) == (0, None, 0)


def merge(state, fragment, *given):
    contributions = [[learner, 1, 0, 4, 1, tokens] for learner, tokens in given]
    note(state, "round", step=4, fragment=fragment, quorum=len(given), contributions=contributions)


def trained(run_info, shares, rounds=4):
    """Three learners on two fragments, 40 tokens each, of which these shares are merged."""
    state = RunState(run_info(3, num_fragments=2), None)
    for learner in range(3):
        for number in range(1, 5):
            state.apply(step(learner, number))
    for _ in range(rounds):
        for fragment in (0, 1):
            merge(state, fragment, *((m, 40 * share / rounds) for m, share in enumerate(shares)))
    return state


def test_the_merged_share_is_of_the_tokens_trained_averaged_over_fragments(run_info):
    state = trained(run_info, (0.9, 0.8, 0.1))
    assert state.merged_shares() == pytest.approx({0: 0.9, 1: 0.8, 2: 0.1})
    assert state.merged_share() == pytest.approx(0.6)


def test_a_learner_below_half_of_the_median_is_left_out_unless_it_is_away_new_or_it_is_too_early(run_info):
    assert trained(run_info, (0.9, 0.8, 0.1)).left_out() == pytest.approx({2: 0.1})
    assert trained(run_info, (0.9, 0.8, 0.5)).left_out() == {}
    assert trained(run_info, (0.9, 0.8, 0.1), rounds=3).left_out() == {}
    away = trained(run_info, (0.9, 0.8, 0.1))
    note(away, "learner_silent", learner=2)
    assert away.left_out() == {}
    new = trained(run_info, (0.9, 0.8, 0.1))
    for number in range(5, 30):
        new.apply(step(0, number))
    assert 2 not in new.left_out()
