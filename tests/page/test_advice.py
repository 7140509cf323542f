"""Each rule said by a run that suffers from just that, and by no other."""

import dataclasses
import pathlib
import re

import pytest

from ddiloco.page import advice as advice_module
from ddiloco.page.advice import advice, remedy
from ddiloco.page.view import HostView
from ddiloco.page.words import seconds, size
from ddiloco.settings.experiment import all_settings
from tests.virtual_runs import virtual

PLANTED = {
    "thin_link": [("thin_link", 3)],
    "third_speed": [("slow", 3)],
    "lives": [("dead", 1)],
    "all_links_thin": [("interval_too_small", None)],
    "busy_syncer": [("syncer_at_its_limit", None)],
    "no_grace": [("grace_unused", None)],
    "everybody_waits": [("slow", 3), ("waiting", None)],
    "nan": [("not_finite", 1)],
    "slow_disk": [("waits_for_data", 2)],
    "steady": [],
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_run_with_planted_trouble_says_what_it_is(view_of, name):
    assert [(one.rule, one.learner) for one in advice(view_of(name))] == PLANTED[name]


def changed(view, **changes):
    """The view with other values of its learners, by field: a value for each."""
    learners = [
        dataclasses.replace(one, **{name: values[place] for name, values in changes.items()})
        for place, one in enumerate(view.learners)
    ]
    return dataclasses.replace(view, learners=learners)


@pytest.mark.parametrize(
    ("rule", "changes"),
    {
        "hung": {"state": ["stepping", "stepping", "hung", "stepping"]},
        "quarantined": {"quarantined": [False, False, True, False]},
        "hardly_merged": {"merged_share": [0.9, 0.9, 0.1, 0.9], "in_recent": [1.0, 1.0, 0.2, 1.0]},
        "restarts": {"starts": [1, 1, 7, 1]},
    }.items(),
)
def test_what_virtual_time_cannot_plant_is_said_of_the_learner(view_of, rule, changes):
    said = advice(changed(view_of("steady"), **changes))
    assert [(one.rule, one.learner) for one in said] == [(rule, 2)]


@pytest.mark.parametrize(
    ("merge", "disk", "scarce"), [(3.0, 0.5, "Give it more cores,"), (0.5, 3.0, "Give it a faster disk,")]
)
def test_a_syncer_at_its_limit_is_said_to_need_what_its_merges_take(view_of, merge, disk, scarce):
    view = view_of("busy_syncer")
    measured = dataclasses.replace(view.syncer, merge_seconds=merge, disk_seconds=disk)
    [said] = advice(dataclasses.replace(view, syncer=measured))
    assert said.do.startswith(scarce) and f"{seconds(disk)} of it for the disk" in said.why


@pytest.mark.parametrize(("gone", "said"), [(30.0, [("host_missing", 2)]), (3.0, [])])
def test_a_learner_waits_for_a_host_that_is_not_connected_for_long(view_of, gone, said):
    hosts = [(), (), [HostView(0, True, 90.0), HostView(1, False, gone)], ()]
    view = changed(view_of("steady"), hosts=hosts, state=["stepping"] * 4)
    assert [(one.rule, one.learner) for one in advice(view)] == said


def test_work_lost_is_said_where_no_other_rule_says_why(view_of):
    view = view_of("steady")
    poor = dataclasses.replace(view, summary={**view.summary, "merged_share": 0.4})
    assert [one.rule for one in advice(poor)] == ["work_lost"]


def test_trouble_comes_before_what_could_be_better(view_of):
    view = changed(view_of("third_speed"), starts=[1, 9, 1, 1], quarantined=[True, False, False, False])
    assert [one.trouble for one in advice(view)] == [True, False, False]


def test_every_setting_that_advice_names_exists(data_dir):
    source = pathlib.Path(advice_module.__file__).read_text()
    named = {name.rstrip(".") for name in re.findall(r"config\.((?:[a-z_]+\.)?[a-z_]+)", source)}
    known = {leaf.path.removeprefix("config.") for leaf in all_settings(virtual(data_dir))}
    groups = {path.rpartition(".")[0] for path in known}
    assert named - known - groups == set()


def test_alarms_have_remedies():
    assert "learning rate" in remedy("learner 3: the loss is nan at step 8")
    assert remedy("something that nobody foresaw") is None


def test_amounts_are_said_as_people_say_them():
    assert [seconds(x) for x in (0.0123, 3.0, 600.0, 9000.0, 400_000.0)] == [
        "12.3 ms",
        "3 s",
        "10 min",
        "2.5 h",
        "4.6 days",
    ]
    assert [size(x) for x in (12, 1500, 2.5e9)] == ["12 B", "1.5 kB", "2.5 GB"]
