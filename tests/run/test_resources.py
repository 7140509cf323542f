"""What processes need of their hosts, in closed form: by hand from the shapes of a small model."""

import pytest

from ddiloco.config import ConfigError
from ddiloco.outer.fragments import fragment
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.run import resources
from ddiloco.run.recipes import assembly_of
from experiments.bench import syncer
from tests import workbench

LAYOUT = fragment({"layers/0/kernel": (256, 128), "layers/1/kernel": (256, 128)}, 2)
FRAGMENT = 4 * 256 * 128


def test_a_syncer_has_two_versions_the_momentum_and_the_offers_of_the_rounds_under_way():
    nesterov, direct = OuterConfig(optimizer="nesterov"), OuterConfig(optimizer="direct")
    least, most = resources.merging_needs(LAYOUT, nesterov, 2, 4, (0, 1))
    assert (least, most) == (3 * 2 * FRAGMENT, (3 * 2 + 3 * (4 + 1)) * FRAGMENT)
    assert resources.merging_needs(LAYOUT, direct, 2, 4, (0, 1)).least == 2 * 2 * FRAGMENT
    assert resources.merging_needs(LAYOUT, nesterov, 2, 4, (1,)) == (3 * FRAGMENT, (3 + 15) * FRAGMENT)


def test_offers_stay_encoded_and_updates_leave_something_out():
    lossy = OuterConfig(optimizer="nesterov", codec="int8", update_codec="int8")
    least, most = resources.merging_needs(LAYOUT, lossy, 0, 4, (0, 1))
    encoded = 256 * 128 + 4 * 256
    assert (least, most - least) == (4 * 2 * FRAGMENT, 4 * encoded + FRAGMENT)
    assert resources.round_bytes(LAYOUT, lossy, 4, (0, 1)) == most - least


def test_where_codecs_differ_each_learner_s_offers_count_and_a_learner_s_plan_is_that_of_most_bytes():
    mixed, lossy = OuterConfig(codec=("f32", "int8", "int8", "int8")), OuterConfig(codec="int8")
    encoded = 256 * 128 + 4 * 256
    assert resources.round_bytes(LAYOUT, mixed, 4, (0, 1)) == 2 * FRAGMENT + 3 * encoded
    assert resources.round_bytes(LAYOUT, mixed, 6, (0, 1)) == 2 * FRAGMENT + 5 * encoded, "as the last"
    assert resources.offer_bytes(LAYOUT, mixed) == 2 * FRAGMENT > resources.offer_bytes(LAYOUT, lossy)
    for rebase in (False, True):
        each = [resources.kept_offers(LAYOUT, one, rebase, LAYOUT.bytes) for one in (OuterConfig(), lossy)]
        assert resources.kept_offers(LAYOUT, mixed, rebase, LAYOUT.bytes) == max(each, key=sum)
    assert resources.late_offers(LAYOUT, mixed)[0] == 2 * FRAGMENT
    assert resources.late_offers(LAYOUT, lossy)[0] == 2 * encoded
    assert resources.late_offers(LAYOUT, mixed)[1] == resources.late_offers(LAYOUT, lossy)[1]


def experiment(**groups):
    return workbench.experiment("/nowhere", driver="remote", **groups)


def test_a_learner_needs_more_where_it_keeps_copies_and_gives_them_away_and_less_on_several_hosts():
    plain = experiment(remote={"donor_port": None}, recovery={"checkpoint_every": 0.0})
    layout = assembly_of(plain).layout
    whole, inner = sum(layout.bytes), resources.inner_bytes(plain)
    assert 2 * whole <= inner < 2.1 * whole, "two moments"
    least, most = resources.learner_needs(plain, layout, 1)
    assert (least, most) == (whole, 2 * whole + 2 * inner)
    assert resources.donor_bytes(plain) == 0
    keeps = experiment(snapshot={"every": 6}, outer={"update_codec": "int8", "codec": "int8"})
    assert resources.donor_bytes(keeps) == inner
    in_flight = (keeps.sync.overlap + 1) * (max(layout.bytes) + max(resources.encoded_bytes(layout, "int8")))
    kept = whole + (2 * whole + inner) + inner
    assert resources.learner_needs(keeps, layout, 1).most == kept + in_flight
    assert resources.offer_bytes(layout, keeps.outer) == in_flight // (keeps.sync.overlap + 1)
    assert resources.learner_needs(keeps, layout, 4).most == (kept + in_flight) // 4


def test_what_cannot_be_on_this_host_is_refused_in_a_line_with_both_sizes(monkeypatch):
    monkeypatch.setattr(resources, "host_memory", lambda: 3 << 29)
    resources.check_memory(resources.Needs(3 << 29, 9 << 30), "the syncer")
    with pytest.raises(ConfigError) as refused:
        resources.check_memory(resources.Needs(2 << 30, 9 << 30), "the syncer")
    assert str(refused.value) == (
        "the syncer needs at least 2.0 GiB of memory, and this host has 1.5 GiB; see --dry_run"
    )


@pytest.mark.slow
def test_a_syncer_s_process_has_about_the_memory_that_is_said():
    for row in syncer.run_memory():
        assert 0.8 * row["needed_mb"] < row["measured"] < 1.3 * row["needed_mb"], row["name"]
