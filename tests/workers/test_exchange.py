"""What a syncer keeps of arrived fragments until their merge: one entry a round and learner."""

import pytest

from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.workers.exchange import Arrivals

FIRST, SECOND = RoundId(4, 0), RoundId(5, 1)


def contribution(learner, incarnation=1):
    return Contribution(learner, incarnation, fragment=0, version=0, step=4, steps=4, tokens=40)


def arrived(learner, round_id=FIRST, incarnation=1):
    return events.FragmentArrived(round_id, contribution(learner, incarnation))


def merge(*learners, round_id=FIRST):
    return actions.Merge(round_id, 1, tuple(contribution(learner) for learner in learners))


@pytest.fixture
def arrivals():
    kept = Arrivals()
    kept.keep(arrived(0), [], "of 0")
    kept.keep(arrived(1), [], "of 1")
    return kept


def test_a_merge_takes_its_contributions_in_its_order_and_they_are_kept_no_longer(arrivals):
    assert arrivals.take(merge(1, 0)) == [(contribution(1), "of 1"), (contribution(0), "of 0")]
    assert len(arrivals) == 0


def test_a_merge_takes_only_what_is_of_its_round(arrivals):
    arrivals.keep(arrived(0, SECOND), [], "of 0, later")
    assert arrivals.take(merge(0)) == [(contribution(0), "of 0")]
    assert len(arrivals) == 2
    assert arrivals.take(merge(0, round_id=SECOND)) == [(contribution(0), "of 0, later")]


def test_what_the_core_dropped_is_not_kept_and_does_not_take_the_place_of_what_it_accepted(arrivals):
    drop = actions.Drop(0, "unexpected fragment", FIRST)
    arrivals.keep(arrived(0), [drop], "a second one")
    arrivals.keep(arrived(2), [actions.Drop(2, "stale fragment", FIRST)], "stale")
    assert len(arrivals) == 2
    assert arrivals.take(merge(0)) == [(contribution(0), "of 0")]


def test_a_drop_of_something_else_leaves_what_arrived(arrivals):
    others = [actions.Drop(2, "stale fragment", SECOND), actions.Drop(3, "stale report"), merge(0, 1)]
    arrivals.keep(arrived(2), others, "of 2")
    assert arrivals.take(merge(2)) == [(contribution(2), "of 2")]


def test_the_newest_accepted_one_of_a_learner_counts(arrivals):
    arrivals.keep(arrived(0, incarnation=2), [], "of its next process")
    assert arrivals.take(merge(0)) == [(contribution(0), "of its next process")]


def test_an_abandoned_round_lets_go_of_its_own_and_of_no_other(arrivals):
    arrivals.keep(arrived(0, SECOND), [], "of 0, later")
    arrivals.forget(actions.Record("round_abandoned", {"step": FIRST.step, "fragment": FIRST.fragment}))
    assert len(arrivals) == 1
    assert arrivals.take(merge(0, round_id=SECOND)) == [(contribution(0), "of 0, later")]


@pytest.mark.parametrize("name", ["round", "round_skipped", "learner_lost"])
def test_other_records_let_go_of_nothing(name, arrivals):
    arrivals.forget(actions.Record(name, {"step": FIRST.step, "fragment": FIRST.fragment, "learner": 0}))
    assert len(arrivals) == 2


def test_a_merge_of_what_never_came_is_a_mistake(arrivals):
    with pytest.raises(KeyError):
        arrivals.take(merge(0, 2))
