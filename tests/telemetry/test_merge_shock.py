"""Merge shock: how the loss changes at updates, when that is made up, and when it is not known."""

import math

import pytest

from ddiloco.telemetry.merge_shock import MIN_UPDATES, MergeShock, merge_shock
from ddiloco.telemetry.state import RunState, summarize
from tests.telemetry.monitor_script import step

UNKNOWN = dict.fromkeys(("merge_shock", "merge_shock_error", "merge_shock_steps", "merge_shock_kept"))


def of(*steps):
    """A learner with these losses; those in brackets follow an update."""
    shock = MergeShock()
    for one in steps:
        shock.add(one[0] if isinstance(one, list) else one, isinstance(one, list))
    return shock


def test_an_update_is_made_up_at_the_first_step_that_is_no_higher_than_before():
    shock = of(2.0, [2.5], 2.2, 2.0, 1.9)
    assert (shock.updates, shock.total, shock.made_up, shock.made_up_steps, shock.kept) == (1, 0.5, 1, 3, 0)


def test_one_that_lowers_the_loss_is_made_up_at_once():
    shock = of(2.0, [1.5], 1.4)
    assert (shock.total, shock.made_up, shock.made_up_steps) == (-0.5, 1, 1)


def test_one_is_kept_if_the_next_update_comes_before_it_is_made_up():
    shock = of(2.0, [2.5], 2.2, [2.4], 2.1)
    assert (shock.updates, shock.kept, shock.made_up) == (2, 1, 1)


def test_what_has_no_loss_beside_it_is_not_counted():
    shock = of([2.0], math.nan, [2.0], 2.0, math.nan)
    assert (shock.updates, shock.made_up, shock.kept, shock.others) == (0, 0, 0, 1)


def test_figures_are_of_all_learners_with_the_error_of_the_mean():
    one = of(*[2.0, [2.4], 2.2, 2.0] * MIN_UPDATES)
    other = of(*[2.0, [2.2], 2.1, 2.1] * MIN_UPDATES)
    assert merge_shock([one, other]) == {
        "merge_shock": pytest.approx(0.3),
        "merge_shock_error": pytest.approx(0.1 / math.sqrt(2 * MIN_UPDATES)),
        "merge_shock_steps": pytest.approx((3 * MIN_UPDATES + 4 * (MIN_UPDATES - 1)) / (2 * MIN_UPDATES - 1)),
        "merge_shock_kept": 0.0,
    }


@pytest.mark.parametrize("steps", [[2.0, [2.4], 2.0], [[2.4], [2.2]] * 2 * MIN_UPDATES, [2.0] * 99])
def test_of_few_updates_or_where_each_step_follows_one_nothing_is_known(steps):
    assert merge_shock([of(*steps)]) == UNKNOWN


def test_a_skipped_step_is_not_compared_with_its_neighbours(run_info):
    state = RunState(run_info(), 0.0)
    for i in range(4 * MIN_UPDATES):
        after = {"updates": 1} if i % 4 == 1 else {}
        skipped = {"skipped": 1} if i % 8 == 1 else {}
        state.apply(step(0, i + 1, float(i), 10, loss=2.0 + 0.1 * bool(after), **after, **skipped))
    assert state.learners[0].shock.updates == MIN_UPDATES // 2
    assert summarize(state, 99.0, [])["merge_shock"] is None
