"""Each rule said by a run that suffers from just that, and by no other."""

import dataclasses
import pathlib
import re

import pytest

from ddiloco.dashboard import advice as advice_module
from ddiloco.dashboard.advice import advice, remedy
from ddiloco.dashboard.sheet import document
from ddiloco.remote.wire.management import VERBS
from ddiloco.settings.experiment import all_settings
from ddiloco.telemetry.formatting import seconds
from tests.dashboard.planted import as_processes
from tests.virtual_runs import virtual

PLANTED = {
    "thin_link": [("thin_link", 3)],
    "far_link": [("thin_link", 3)],
    "third_speed": [("slow", 3)],
    "lives": [("dead", 1)],
    "all_links_thin": [("interval_too_small", None)],
    "busy_syncer": [("syncer_at_its_limit", None)],
    "no_grace": [("grace_unused", None)],
    "everybody_waits": [("slow", 3), ("waiting", None)],
    "one_job_waits": [("waiting", None)],
    "nan": [("not_finite", 1)],
    "overflow": [("skips_steps", 1)],
    "slow_disk": [("waits_for_data", 2)],
    "hang": [("hung", 2)],
    "missing_host": [("host_missing", 2)],
    "inflated": [("quarantined", 1)],
    "late_offers": [("hardly_merged", 3)],
    "restarts": [("restarts", 2)],
    "far_apart": [("work_lost", None)],
    "costly_merges": [("merge_shock", None)],
    "planned": [("interval_too_small", None), ("planned", None)],
    "late_planned": [("hardly_merged", 3), ("worth", 3)],
    "steady": [],
}


OFTEN = ("thin_link", "lives", "nan", "hang", "restarts", "merge_shock", "planned", "steady")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in PLANTED]
)
def test_a_run_with_planted_trouble_says_what_it_is(view_of, name):
    assert [(one.rule, one.learner) for one in advice(view_of(name))] == PLANTED[name]


def test_every_rule_is_made_true_in_virtual_time():
    said = {rule for planted in PLANTED.values() for rule, _ in planted}
    assert said == {rule.__name__ for rule in advice_module.RULES}


def changed(view, **changes):
    """The view with other values of its learners, by field: a value for each."""
    learners = [
        dataclasses.replace(one, **{name: values[place] for name, values in changes.items()})
        for place, one in enumerate(view.learners)
    ]
    return dataclasses.replace(view, learners=learners)


@pytest.mark.parametrize(
    ("merge", "disk", "scarce"), [(3.0, 0.5, "Give it more cores,"), (0.5, 3.0, "Give it a faster disk,")]
)
def test_a_syncer_at_its_limit_is_said_to_need_what_its_merges_take(view_of, merge, disk, scarce):
    view = view_of("busy_syncer")
    measured = dataclasses.replace(view.syncer, merge_seconds=merge, disk_seconds=disk)
    [said] = advice(dataclasses.replace(view, syncer=measured))
    assert said.do.startswith(scarce) and f"{seconds(disk)} of it for the disk" in said.why


def test_a_link_that_is_only_far_is_not_said_to_be_thin(view_of):
    [said] = advice(view_of("far_link"))
    assert said.what == "Learner 3: its link to the syncer is far." and "sync.interval" in said.do
    [said] = advice(view_of("thin_link"))
    assert said.what == "Learner 3: its link to the syncer is too thin."


def test_a_learner_s_own_codec_is_named_and_its_bytes_are_held_to_those_of_its_codec(view_of):
    view = view_of("thin_link")
    config = {**view.config, "outer": {**view.config["outer"], "codec": ["f32", "f32", "f32", "int8"]}}
    [said] = advice(dataclasses.replace(view, config=config))
    assert said.rule == "hardly_merged", "no other sends in int8"
    config = {**view.config, "outer": {**view.config["outer"], "codec": ["int4", "int4", "f32", "f32"]}}
    [said] = advice(dataclasses.replace(changed(view, sent=[500, 500, 4000, 1]), config=config))
    assert "(config.outer.codec is f32;" in said.do


@pytest.mark.parametrize("name", ["thin_link", "all_links_thin"])
def test_a_narrower_codec_is_advised_only_where_there_is_one(name, view_of):
    view = view_of(name)
    for codec, advised in {"f32": True, "int8": True, "int4": False, "int2": False, "sign": False}.items():
        config = {**view.config, "outer": {**view.config["outer"], "codec": codec}}
        [said] = advice(dataclasses.replace(view, config=config))
        assert ("int4" in said.do) == advised


@pytest.mark.parametrize(
    ("name", "algorithm"), [("everybody_waits", "streaming"), ("one_job_waits", "data_parallel")]
)
def test_those_who_wait_hear_which_algorithm_has_it_so(view_of, name, algorithm):
    [said] = [one for one in advice(view_of(name)) if one.rule == "waiting"]
    assert said.why.startswith(f"With algorithm {algorithm} they wait")


def test_where_all_skip_steps_one_word_is_for_all(view_of):
    view = changed(view_of("steady"), skipped_share=[0.5, 0.2, 0.9, 0.3])
    [said] = advice(view)
    assert said.learner is None and said.what.startswith("All learners skip steps")
    view = changed(view_of("steady"), skipped_share=[0.5, 0.1, 0.0, 0.3])
    assert [one.learner for one in advice(view)] == [0, 3]


def test_what_an_operator_can_do_is_a_command_to_copy_while_there_is_a_syncer_to_ask(view_of):
    running = as_processes(view_of("hang"))
    [said] = advice(running)
    assert said.commands == ["python -m experiments.control --syncer=HOST:PORT evict 2"]
    assert f"<code>{said.commands[0]}</code>" in document([running])
    for over in (view_of("hang"), dataclasses.replace(running, status="stopped")):
        assert "experiments.control" not in document([over])


@pytest.mark.parametrize("name", ["nan", "hang", "inflated", "restarts"])
def test_the_commands_are_those_of_the_program(name, view_of):
    commands = [command for said in advice(as_processes(view_of(name))) for command in said.commands]
    assert commands
    for command in commands:
        verb = command.removeprefix("python -m experiments.control --syncer=HOST:PORT ").split()
        assert verb[0] in VERBS and verb[1].isdecimal() and len(verb) == 2


def test_a_plan_whose_settings_are_all_timing_is_a_command_while_the_run_goes_on(view_of):
    view = as_processes(view_of("planned"))
    [said] = [one for one in advice(view) if one.rule == "planned"]
    assert said.commands == () and "outer.codec=int4" in said.what
    timed = dataclasses.replace(view, plan={**view.plan, "flags": ["--config.sync.interval=24"]})
    [said] = [one for one in advice(timed) if one.rule == "planned"]
    assert said.commands == [
        "python -m experiments.control --syncer=HOST:PORT set sync.interval=24 --reason=plan"
    ]
    retimed = {**view.config, "sync": {**view.config["sync"], "interval": 99}}
    old = dataclasses.replace(view, config=retimed)
    assert not [one for one in advice(old) if one.rule == "planned"], "of other settings"


def test_every_setting_that_advice_names_exists(data_dir):
    source = pathlib.Path(advice_module.__file__).read_text()
    named = {name.rstrip(".") for name in re.findall(r"config\.((?:[a-z_]+\.)?[a-z_]+)", source)}
    known = {leaf.path.removeprefix("config.") for leaf in all_settings(virtual(data_dir))}
    groups = {path.rpartition(".")[0] for path in known}
    assert named - known - groups == set()


def test_alarms_have_remedies():
    assert "learning rate" in remedy("learner 3: the loss is nan at step 8")
    assert "learning_rate" in remedy("learner 3: skips steps, from step 8 on 3 of 24, as it is not finite")
    assert "rollback" in remedy("held-out loss is nan from step 8 on: the global model is spoilt")
    assert "snapshot.timeout" in remedy(
        "snapshots: learner 1 wrote no checkpoint within snapshot.timeout: ..."
    )
    assert remedy("something that nobody foresaw") is None


def test_work_that_is_overwritten_for_its_age_is_said_of_the_link(view_of):
    view = view_of("steady")
    times = view.syncer.rounds // 20
    [said] = advice(changed(view, overwritten=[0, times, 0, 0]))
    assert (said.rule, said.learner) == ("thin_link", 1)
    assert (
        said.why == f"An update has overwritten its work {times} times: it was not merged within 8 versions."
    )
    assert not advice(changed(view, overwritten=[0, 1, 0, 0]))
    assert remedy("learner 1: unmerged work is overwritten: its link to the syncer is too slow")
