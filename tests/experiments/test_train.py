"""What the trainer says without training."""

import json
import re

import pytest

from tests.refusals import assert_refused


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


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("eval.devices=0", "config.eval.devices: has no use where driver is virtual"),
        ("outer.merge=direct", "config.outer.embeddings: has no use where outer.merge is direct"),
    ],
)
def test_a_setting_of_the_command_line_without_a_use_is_refused(given, told, programs, tmp_path):
    changes = ["--config.driver=virtual", "--config.outer.embeddings=rda", f"--config.{given}"]
    done = programs.run("train", *changes, f"--workdir={tmp_path / 'run'}")
    assert_refused(done, f"{told}; leave it out\n")
    assert not (tmp_path / "run").exists()


def test_settings_of_a_file_for_other_drivers_are_no_mistake(programs, tmp_path):
    (tmp_path / "own.py").write_text(
        "from configs import dense\n\n\ndef get_config():\n    config = dense.get_config()\n"
        "    config.remote.spares, config.eval.devices, config.outer.optimizer = 2, 1, 'direct'\n"
        "    config.virtual.arrays = False\n    return config\n"
    )
    given = {"driver": "virtual", "train.steps": 24, "log.page": ""}
    changes = [f"--config.{path}={value}" for path, value in given.items()]
    done = programs.run("train", f"--config={tmp_path / 'own.py'}", *changes, f"--workdir={tmp_path / 'run'}")
    assert (done.returncode, done.stderr) == (0, "")
