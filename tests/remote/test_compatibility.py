"""Terms: what learners and syncer decide by together, and what each may have for itself."""

import pytest

from ddiloco.remote.wire.compatibility import difference, terms_of
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
        {"outer": {"codec": ("f32", "int8")}},
        {"model": {"rope_theta": 2e4}},
        {"inner": {"learning_rate": 0.1}},
        {"data": {"train_split": "train[:7%]"}},
        {"train": {"batch_size": 3}},
        {"seed": 7},
    ],
    ids=str,
)
def test_a_setting_that_both_ends_decide_by_changes_the_rules(groups):
    assert terms(**groups).rules != terms().rules


def test_each_learner_s_offers_have_the_formats_of_its_codec():
    both, lossy, plain = (terms(outer={"codec": codec}) for codec in (("f32", "int8"), "int8", "f32"))
    assert (both.offers(0), both.offers(1), both.offers(2)) == (plain.offers(1), *[lossy.offers(0)] * 2)
    assert both.down == plain.down == plain.offers(0) != lossy.offers(0)


def test_what_each_end_may_have_for_itself_does_not():
    own = terms(
        train={"executable": "compiled.bin"},
        eval={"every": 5},
        remote={"keepalive": 3.0},
        mesh={"fsdp": 1},
        inner={"accumulation": 2},
        model={"remat": "full", "scan_layers": True},
        data={"prefetch": 2},
        init_from="only/the/syncer/reads/it",
    )
    assert own == terms()


def test_the_first_setting_that_differs_is_named_with_both_values():
    ours = terms().rules
    assert difference(ours, ours) is None
    theirs = terms(inner={"learning_rate": 0.1}, sync={"interval": 6}).rules
    was = workbench.experiment("/nowhere").inner.learning_rate
    assert difference(ours, theirs) == f"config.inner.learning_rate: the syncer has {was}, the learner 0.1"


@pytest.mark.parametrize(
    "theirs", ["", "[", "[1]", "null", "[[" * 5000, '{"x": 1}', '{"\\n": "' + "x" * 9999 + '"}']
)
def test_rules_that_are_none_are_another_in_one_short_line(theirs):
    told = difference(terms().rules, theirs)
    assert told and len(told) < 400 and "\n" not in told


def test_another_model_has_another_fingerprint():
    assert terms(model={"mlp_dim": 48}).fingerprint != terms().fingerprint
