"""The books of outer steps and of merged work: every planted mistake is found, and none where all is well."""

from experiments.studies.chaos.committed import check_outer_steps, check_work

START = 1_000_000_000_000_000  # an incarnation: microseconds


def round_of(time, fragment, version, *contributions):
    return {"time": time, "fragment": fragment, "version": version, "contributions": list(contributions)}


def given(learner, version, step, steps, incarnation=START, tokens=None):
    return [learner, incarnation, version, step, steps, 10 * steps if tokens is None else tokens]


# Outer steps.

ROUNDS = [round_of(1, 0, 1), round_of(2, 1, 1), round_of(3, 0, 2), round_of(11, 1, 2), round_of(12, 0, 3)]
DURABLE = [(10, [2, 1]), (20, [3, 2])]


def found(rounds, durable):
    books = check_outer_steps(rounds, durable)
    return (books.committed, books.recorded, books.unrecorded, books.lost, books.twice), books.problems


def test_a_durable_version_whose_line_died_with_the_syncer_is_not_lost():
    rounds = [ROUNDS[0], ROUNDS[1], *ROUNDS[3:]]
    assert found(rounds, DURABLE) == ((5, 4, 1, 0, 0), [])


def test_a_version_that_was_told_and_is_not_durable_after_a_death_is_lost():
    books, problems = found([*ROUNDS[:4], round_of(12, 0, 2)], [(10, [1, 1]), (20, [2, 2])])
    assert books == (4, 5, 0, 1, 0)
    assert problems[0] == "fragment 0: was at version 2, and after a death at 1"


def test_a_version_that_is_made_in_two_lives_is_found():
    books, problems = found([*ROUNDS[:4], round_of(12, 0, 2), round_of(13, 0, 3)], DURABLE)
    assert books == (5, 6, 0, 0, 1)
    assert problems == ["fragment 0: versions [2] were made twice"]


def test_a_hole_within_a_life_is_found():
    rounds = [round_of(1, 0, 1), round_of(2, 0, 3)]
    _, problems = found(rounds, [(10, [3])])
    assert problems[0] == "fragment 0: versions [1, 3] do not go up by one from 0"


def test_a_run_whose_durable_state_was_never_seen_is_not_called_well():
    assert found(ROUNDS, [])[1] == ["the syncer's durable state was never seen"]


# Merged work.


def work(*rounds):
    books = check_work(rounds)
    return books.contributions, books.merged_tokens, books.twice_tokens, books.problems


def test_work_that_follows_on_itself_is_counted_once():
    first = round_of(1, 0, 1, given(0, 0, 24, 24), given(1, 0, 25, 20))
    second = round_of(2, 0, 2, given(0, 1, 48, 24), given(1, 1, 48, 22))
    assert work(first, second) == (4, 900, 0, [])


def test_counters_that_were_not_reset_are_found():
    first, second = round_of(1, 0, 1, given(0, 0, 24, 24)), round_of(2, 0, 2, given(0, 1, 48, 48))
    assert work(first, second) == (2, 720, 240, ["fragment 0, version 2: 24 of 48 steps of learner 0 again"])


def test_a_process_that_returned_is_still_the_same_process():
    first = round_of(1, 0, 1, given(0, 0, 24, 24))
    again = round_of(2, 0, 2, given(0, 1, 48, 30, incarnation=START + 1))
    assert work(first, again)[2] == 60


def test_another_process_does_its_own_work_at_the_same_clock():
    first = round_of(1, 0, 1, given(0, 0, 24, 24))
    other = round_of(2, 0, 2, given(0, 1, 26, 20, incarnation=START + 5_000_000))
    assert work(first, other)[2:] == (0, [])


def test_a_learner_that_gives_twice_to_one_merge_is_found():
    both = round_of(1, 0, 1, given(0, 0, 24, 24), given(0, 0, 24, 24, incarnation=START + 5_000_000))
    assert work(both)[3] == ["fragment 0, version 1: a learner gave twice to one merge"]
