"""The planted mistakes follow the code: each has its one place in the package, and tests that are there."""

from tests.mutation.__main__ import MUTANTS, ROOT, named_tests, place


def test_every_mistake_can_be_planted():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60
    for mutant in MUTANTS:
        assert mutant.old != mutant.new
        assert place(mutant, ROOT), mutant.name
        assert all(named_tests(mutant._replace(tests=(end,)), ROOT) for end in mutant.tests), mutant.name
