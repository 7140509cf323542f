"""A model that is exported and trained on: every driver begins at the loss that it ended with."""

import re

import pytest

from tests.integration.remote_runs import summary_of
from tests.refusals import assert_refused

SHORT = ("--config.sample.tokens=0", "--config.eval.every=0")
DRIVERS = (
    ("--config.driver=local", "--config.model.scan_layers=True"),
    ("--config.driver=remote",),
    ("--config.driver=virtual",),
    ("--config.algorithm=data_parallel",),
    ("--config.algorithm=data_parallel", "--config.driver=virtual"),
)


@pytest.mark.parametrize("drivers", [DRIVERS[:1], pytest.param(DRIVERS[1:], marks=pytest.mark.slow)])
def test_every_driver_begins_at_the_loss_of_the_weights_and_trains_on(programs, tmp_path, drivers):
    weights = tmp_path / "weights"
    assert programs.train(tmp_path / "first", *SHORT).returncode == 0
    done = programs.run("export", f"--workdir={tmp_path / 'first'}", f"--to={weights}")
    assert re.fullmatch(rf"the global model of step \d+ is in {weights}\n", done.stdout), done.stderr
    ended = summary_of(tmp_path / "first")["eval_loss"]
    for number, settings in enumerate(drivers):
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
        ("export", ["--workdir=nowhere"], "to: is missing; give --to"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(programs, tmp_path, program, arguments, told):
    done = programs.run(program, *(f"--workdir={tmp_path}",) * (program == "train"), *arguments)
    assert_refused(done, told)


@pytest.mark.slow
def test_a_model_that_transformers_has_not_is_exported_as_what_it_has(programs, tmp_path):
    settings = ("--config=configs/moe.py", *SHORT, "--config.driver=virtual", "--config.model.expert_dim=8")
    assert programs.train(tmp_path / "run", *settings).returncode == 0
    export = ("export", f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'weights'}")
    told = "config.model.capacity_factor: is 1.5, but must be None, as Qwen3-MoE has it\n"
    assert_refused(programs.run(*export), told)
    told = "config.model.num_layers: the parameters would be others than the run's\n"
    assert_refused(programs.run(*export, "--config.model.num_layers=2"), told)
    done = programs.run(*export, "--config.model.capacity_factor=None")
    assert done.returncode == 0 and (tmp_path / "weights" / "model.safetensors").exists(), done.stderr
