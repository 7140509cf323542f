"""What the trainer says without training."""

import json
import re


def test_the_command_prints_it_with_what_is_set_and_trains_nothing(programs, tmp_path):
    workdir = tmp_path / "run"
    done = programs.run("train", "--settings", "--config.train.steps=7", f"--workdir={workdir}")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^train.steps +7 +T: global steps; .*\[at least 1\]$", done.stdout, re.M)
    assert not workdir.exists()


def test_all_that_it_prints_is_json_if_that_is_wanted(programs, tmp_path):
    settings = {"virtual.arrays": False, "log.json": True, "train.steps": 24, "driver": "virtual"}
    changes = [f"--config.{path}={value}" for path, value in settings.items()]
    done = programs.run("train", *changes, f"--workdir={tmp_path / 'mine'}")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (done.stdout + done.stderr).splitlines()]
    assert {(line["run"], line["role"]) for line in lines} == {("mine", "all")}
    assert any(line["message"].startswith("24 steps in") for line in lines)


def test_a_setting_that_changes_nothing_is_told_before_the_run(programs, tmp_path):
    given = {
        "driver": "virtual",
        "virtual.arrays": False,
        "train.steps": 24,
        "remote.spares": 0,
        "outer.optimizer": "direct",
        "outer.learning_rate": 0.7,
        "outer.momentum": 0.3,
        "outer.merge": "direct",
        "outer.embeddings": "direct",
        "log.page": "",
    }
    changes = [f"--config.{path}={value}" for path, value in given.items()]
    done = programs.run("train", *changes, f"--workdir={tmp_path}")
    assert (done.returncode, done.stderr.splitlines()) == (
        0,
        [
            "config.remote.spares: changes nothing where driver is virtual",
            "config.outer.learning_rate: changes nothing where outer.optimizer is direct",
            "config.outer.momentum: changes nothing where outer.optimizer is direct",
            "config.outer.embeddings: changes nothing where outer.merge is direct",
        ],
    )
