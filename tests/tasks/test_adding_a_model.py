"""docs/your_own.md, done: its two files are put where it says, and train."""

import pathlib
import re
import threading

import pytest

from ddiloco import models
from ddiloco.run.job import run_job
from ddiloco.settings.experiment import parse
from experiments.cli import program
from tests import workbench

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "your_own.md"


def blocks():
    """The files of a model and of its config."""
    section = PAGE.read_text().split("\n## A model\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.S)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The path of the config, with the model's file beside the other models'."""
    model, config = blocks()
    for folder, text in (("models", model), ("configs", config)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "toy.py").write_text(text)
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path / "models")])
    return tmp_path / "configs" / "toy.py"


@pytest.mark.parametrize("algorithm", ["decoupled", pytest.param("data_parallel", marks=pytest.mark.slow)])
def test_two_files_are_a_model_that_trains(algorithm, toy, data_dir, tmp_path):
    config = program.load_config(f"{toy}:{algorithm}")
    config.driver = "virtual"
    config.data.update(data_dir=data_dir, sequence_length=16, train_split="train[:60]")
    config.train.update(steps=8, batch_size=2)
    config.inner.update(warmup_steps=0)
    config.sync.update(interval=4)
    config.eval.update(every=0, num_batches=1, batch_size=4)
    config.sample.tokens = 4
    with workbench.devices(1):
        result = run_job(parse(config), tmp_path / "run", threading.Event())
    assert result.failure is None
    assert result.summary["num_params"] == 2 * 259 * 8
    first, last = (entry["loss"] for entry in result.summary["eval_history"])
    assert last < first
