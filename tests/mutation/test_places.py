"""The planted mistakes follow the code: each has its one place in the package, and tests that are there."""

from tests.mutation.__main__ import MUTANTS, ROOT, listing, named_tests, package, place


def test_every_mistake_can_be_planted():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60
    texts, tests = package(ROOT), listing(ROOT)
    for mutant in MUTANTS:
        assert mutant.old != mutant.new
        assert place(mutant, texts), mutant.name
        assert all(named_tests(mutant._replace(tests=(end,)), tests) for end in mutant.tests), mutant.name
