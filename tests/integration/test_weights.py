"""A model that is exported and trained on: every driver begins at the loss that it ended with."""

import re

import pytest

from tests.integration.remote_runs import summary_of
from tests.refusals import assert_refused

SHORT = ("--config.sample.tokens=0", "--config.eval.every=0")
VIRTUAL = ("--config.driver=virtual", "--config.train.min_step_seconds=()")
DRIVERS = (
    ("--config.driver=local", "--config.model.scan_layers=True"),
    ("--config.driver=remote",),
    VIRTUAL,
    ("--config.algorithm=data_parallel",),
    ("--config.algorithm=data_parallel", *VIRTUAL),
)


@pytest.mark.slow
def test_every_driver_begins_at_the_loss_of_the_weights_and_trains_on(programs, tmp_path):
    weights = tmp_path / "weights"
    assert programs.train(tmp_path / "first", *SHORT).returncode == 0
    done = programs.run("export", f"--workdir={tmp_path / 'first'}", f"--to={weights}")
    assert re.fullmatch(rf"the global model of step \d+ is in {weights}\n", done.stdout), done.stderr
    ended = summary_of(tmp_path / "first")["eval_loss"]
    for number, settings in enumerate(DRIVERS):
        workdir = tmp_path / str(number)
        done = programs.train(workdir, *SHORT, f"--config.init_from={weights}", *settings)
        assert done.returncode == 0, (settings, done.stderr)
        [first, last] = summary_of(workdir)["eval_history"]
        assert first["loss"] == pytest.approx(ended, abs=1e-6), settings
        assert last["loss"] != first["loss"], settings


@pytest.mark.parametrize(
    ("program", "arguments", "told"),
    [
        ("train", ["--config.init_from=nowhere"], "config.init_from: nowhere/config.json: No such file"),
        ("export", ["--workdir=nowhere", "--to=out"], "workdir: "),
    ],
)
def test_what_cannot_be_is_told_in_one_line(programs, tmp_path, program, arguments, told):
    done = programs.run(program, *(f"--workdir={tmp_path}",) * (program == "train"), *arguments)
    assert_refused(done, told)
