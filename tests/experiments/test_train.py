"""What the trainer says without training."""

import re


def test_the_command_prints_it_with_what_is_set_and_trains_nothing(programs, tmp_path):
    workdir = tmp_path / "run"
    done = programs.run("train", "--settings", "--config.train.steps=7", f"--workdir={workdir}")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^train.steps +7 +T: global steps; .*\[at least 1\]$", done.stdout, re.M)
    assert not workdir.exists()
