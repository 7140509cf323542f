"""The planted mistakes follow the code: each has its one place in the package, and tests that are there."""

import pytest

from tests.mutation.__main__ import MUTANTS, ROOT, place, tests_of


def test_the_mistakes_have_names_of_their_own():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_can_be_planted(mutant):
    assert mutant.old != mutant.new
    assert place(mutant, ROOT).suffix == ".py"
    assert all(tests_of(mutant._replace(tests=(end,)), ROOT) for end in mutant.tests)
