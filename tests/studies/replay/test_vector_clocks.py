"""Vector clocks: an order of states by what they follow from, against sets of everything that they hold."""

from hypothesis import given
from hypothesis import strategies as st

from experiments.studies.replay.timeline import VectorClock

CLOCKS = st.builds(
    VectorClock,
    st.dictionaries(st.integers(0, 2), st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=3),
    st.dictionaries(st.integers(0, 2), st.integers(1, 3), max_size=3),
)


def holds(clock):
    """Everything that a state with this clock holds, one by one."""
    steps = {
        (m, (i, s)) for m, at in clock.learners.items() for i in range(3) for s in range(4) if (i, s) <= at
    }
    return steps | {
        ("fragment", p, v) for p, version in clock.versions.items() for v in range(1, version + 1)
    }


@given(CLOCKS, CLOCKS)
def test_one_state_comes_before_another_if_the_other_holds_all_of_it(a, b):
    assert (a <= b) == (holds(a) <= holds(b))


@given(CLOCKS, CLOCKS)
def test_a_state_that_joins_two_holds_what_both_do_and_no_more(a, b):
    joined = a.joined(b)
    assert holds(joined) == holds(a) | holds(b)
    assert a <= joined
    assert b <= joined
    assert joined == b.joined(a)


def test_a_learner_welcomed_anew_at_an_earlier_step_comes_after_itself():
    before, after = VectorClock({0: (1, 50)}), VectorClock({0: (2, 10)})
    assert before <= after and not after <= before
