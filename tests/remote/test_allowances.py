"""Allowances: so many at once, more as time goes by, and each learner for itself."""

from ddiloco.remote.syncer.server import Allowances


def test_a_bucket_empties_and_fills_again_up_to_its_bound():
    it = Allowances(3, 2.0)
    assert [it.take(0, 10.0) for _ in range(5)] == [True, True, True, False, False]
    assert [it.take(0, 10.5) for _ in range(2)] == [True, False]
    assert [it.take(0, 99.0) for _ in range(4)] == [True, True, True, False]
    assert it.take(1, 10.0), "another learner's is full"


def test_what_costs_more_than_all_there_may_be_needs_a_full_one():
    it = Allowances(4, 1.0)
    assert it.take(0, 0.0, cost=100.0)
    assert not it.take(0, 3.9, cost=100.0)
    assert it.take(0, 4.0, cost=100.0)
    assert not it.take(0, 4.0)
