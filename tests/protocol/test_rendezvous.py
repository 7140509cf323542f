"""Which hosts of a learner train together, by a clock that the tests hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.protocol.rendezvous import RESTART_SECONDS, Dissolve, Form, Rendezvous

TIMEOUT = 30.0


def joined(rendezvous, hosts, now=0.0):
    for host in hosts:
        rendezvous.join(host, now)
    return rendezvous.decide(now)


def lost(rendezvous, host, now):
    """A host is killed: the others of its group end with it, and come back."""
    others = [other for other in rendezvous.group if other != host]
    for one in rendezvous.group:
        rendezvous.leave(one, now)
    return joined(rendezvous, others, now)


def test_hosts_that_are_all_there_begin_at_once():
    assert joined(Rendezvous(4, 2, TIMEOUT), (2, 0, 3)) is None
    four = Rendezvous(4, 2, TIMEOUT)
    assert joined(four, (2, 0, 3, 1)) == Form((0, 1, 2, 3))
    assert four.decide(1e6) is None


def test_those_that_are_left_wait_for_the_timeout_and_go_on_whichever_was_lost():
    for killed in (0, 1):
        two = Rendezvous(2, 1, TIMEOUT)
        joined(two, (0, 1))
        assert lost(two, killed, 100.0) is None
        assert two.decide(100.0 + TIMEOUT - 0.1) is None
        assert two.decide(100.0 + TIMEOUT) == Form((1 - killed,))


def test_a_host_that_comes_back_in_time_shrinks_nothing():
    two = Rendezvous(2, 1, TIMEOUT)
    joined(two, (0, 1))
    assert lost(two, 1, 100.0) is None
    assert joined(two, (1,), 110.0) == Form((0, 1))


@pytest.mark.parametrize(
    ("count", "fewest", "left", "size"),
    [(4, 1, 3, 2), (4, 2, 3, 2), (4, 4, 3, 0), (6, 1, 5, 3), (6, 2, 5, 2), (6, 3, 2, 0), (3, 1, 2, 1)],
)
def test_a_group_s_size_divides_the_learner_s_and_is_a_multiple_of_the_fewest(count, fewest, left, size):
    hosts = Rendezvous(count, fewest, TIMEOUT)
    joined(hosts, range(count - left, count))
    assert hosts.decide(TIMEOUT) == (Form(tuple(range(count - left, count))[:size]) if size else None)


def test_a_group_leaves_once_for_a_host_that_comes_back_and_comes_back_with_it():
    two = Rendezvous(2, 1, TIMEOUT)
    joined(two, (0,))
    assert two.decide(TIMEOUT) == Form((0,))
    assert joined(two, (1,), 100.0) == Dissolve((0,))
    assert two.decide(100.0) is None, "it was asked already"
    two.leave(0, 101.0)
    assert two.decide(101.0 + TIMEOUT) is None, "it was asked to come back, and may take longer"
    assert joined(two, (0,), 200.0) == Form((0, 1))


def test_a_host_that_does_not_come_back_as_it_was_asked_to_is_lost_at_last():
    two = Rendezvous(2, 1, TIMEOUT)
    joined(two, (0,))
    two.decide(TIMEOUT)
    assert joined(two, (1,), 100.0) == Dissolve((0,))
    two.leave(0, 101.0)
    assert two.decide(101.0 + RESTART_SECONDS - 0.1) is None
    assert two.decide(101.0 + RESTART_SECONDS) == Form((1,))
    assert lost(two, 1, 900.0) is None
    two.join(0, 901.0)
    assert two.decide(901.0 + TIMEOUT) == Form((0,)), "nobody is expected any more"


def test_a_host_that_makes_the_group_no_larger_waits_and_of_several_the_group_leaves_for_all():
    four = Rendezvous(4, 1, TIMEOUT)
    joined(four, (0, 1))
    assert four.decide(TIMEOUT) == Form((0, 1))
    assert joined(four, (2,), 50.0) is None and four.decide(500.0) is None
    assert joined(four, (3,), 600.0) == Dissolve((0, 1))
    one = Rendezvous(4, 1, TIMEOUT)
    joined(one, (0,))
    assert one.decide(TIMEOUT) == Form((0,))
    assert joined(one, (1,), 50.0) is None, "others may come back at the same time"
    assert one.decide(50.0 + TIMEOUT) == Dissolve((0,))


def test_hosts_whose_syncer_was_away_are_still_a_group_and_those_of_an_older_one_are_not():
    two = Rendezvous(2, 1, TIMEOUT)
    two.join(1, 5.0, group=(0, 1))
    assert two.decide(500.0) is None and two.group == (0, 1)
    two.join(0, 501.0, group=(0, 1))
    two.leave(0, 502.0)
    assert two.decide(900.0) is None, "a connection alone was lost"
    two.join(0, 903.0, group=(0, 1))
    with pytest.raises(ValueError, match="train, not"):
        two.join(0, 904.0, group=(0,))


def test_a_host_s_next_process_waits_until_the_others_have_ended_too():
    two = Rendezvous(2, 1, TIMEOUT)
    joined(two, (0, 1))
    two.join(1, 50.0)  # before its old connection was seen to end
    assert two.decide(50.0) is None and two.decide(50.0 + TIMEOUT - 0.1) is None
    two.leave(0, 60.0)
    two.join(0, 61.0)
    assert two.decide(61.0) == Form((0, 1))


def test_a_host_that_hangs_is_lost_once_the_timeout_is_over_and_is_none_of_the_group_as_it_wakes():
    two = Rendezvous(2, 1, TIMEOUT)
    joined(two, (0, 1))
    two.leave(1, 50.0)
    assert joined(two, (1,), 51.0) is None
    assert two.decide(51.0 + TIMEOUT) == Form((1,))
    two.leave(0, 90.0)
    assert two.group == (1,)
    with pytest.raises(ValueError, match="train, not"):
        two.join(0, 91.0, group=(0, 1))


@pytest.mark.parametrize("fewest", [0, 3, 5])
def test_a_number_of_hosts_that_does_not_divide_theirs_is_refused(fewest):
    with pytest.raises(ValueError, match=r"must divide 4"):
        Rendezvous(4, fewest, TIMEOUT)


@given(st.lists(st.tuples(st.sampled_from(("come", "lose", "wait")), st.integers(0, 3)), max_size=40))
def test_whatever_comes_and_goes_a_learner_of_which_enough_is_there_trains_in_the_end(events):
    four, there, now = Rendezvous(4, 2, TIMEOUT), set(), 0.0

    def follow(decision):
        """What the processes do: those of a group that is asked to end, or has lost one, come back."""
        while isinstance(decision, Dissolve):
            for host in decision.hosts:
                four.leave(host, now)
            decision = joined(four, [host for host in decision.hosts if host in there], now)
        return decision

    for what, host in events:
        now += 1.0
        if what == "come" and host not in there:
            there.add(host)
            follow(joined(four, (host,), now))
        elif what == "lose" and host in there:
            there.discard(host)
            if host in four.group:
                lost(four, host, now)
            else:
                four.leave(host, now)
        elif what == "wait":
            now += TIMEOUT
            follow(four.decide(now))
    for _ in range(2):
        now += RESTART_SECONDS
        follow(four.decide(now))
    assert set(four.group) <= there
    assert len(four.group) == (4 if len(there) == 4 else 2 if len(there) >= 2 else 0)
