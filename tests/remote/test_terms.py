"""Terms: what learners and syncer decide by together, and what each may have for itself."""

import pytest

from ddiloco.remote.wire.terms import terms_of
from ddiloco.run.recipes import assembly_of
from tests import workbench


def terms(**groups):
    experiment = workbench.experiment("/nowhere", **groups)
    return terms_of(experiment, assembly_of(experiment).layout)


@pytest.mark.parametrize(
    "groups",
    [
        {"train": {"steps": 13}},
        {"sync": {"interval": 6}},
        {"sync": {"quorum": 2}},
        {"sync": {"rebase": True}},
        {"outer": {"codec": "int8"}},
    ],
    ids=str,
)
def test_a_setting_that_both_ends_decide_by_changes_the_rules(groups):
    assert terms(**groups).rules != terms().rules


def test_what_each_end_may_have_for_itself_does_not():
    own = terms(train={"steps_in_flight": 1}, eval={"every": 5}, remote={"keepalive": 3.0})
    assert own == terms()


def test_another_model_has_another_fingerprint():
    assert terms(model={"mlp_dim": 48}).fingerprint != terms().fingerprint
