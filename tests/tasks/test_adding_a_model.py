"""docs/adding_a_model.md, done: its two files are put where it says, and train."""

import os
import pathlib
import re
import subprocess
import sys
import threading

import pytest

from ddiloco import models
from ddiloco.data.sources import open_text
from ddiloco.run.job import run_job
from ddiloco.settings.experiment import parse
from experiments.front import cli
from tests import workbench

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "adding_a_model.md"


def blocks():
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The path of the config, with the model's file beside the other models'."""
    model, config, _ = blocks()
    for folder, text in (("models", model), ("configs", config)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "toy.py").write_text(text)
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path / "models")])
    return tmp_path / "configs" / "toy.py"


@pytest.mark.parametrize("algorithm", ["decoupled", "data_parallel"])
def test_two_files_are_a_model_that_trains(algorithm, toy, data_dir, tmp_path):
    config = cli.load_config(f"{toy}:{algorithm}")
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


def test_texts_become_a_data_set_of_the_name_of_their_class(tmp_path):
    (tmp_path / "texts").mkdir()
    for n in range(60):
        (tmp_path / "texts" / f"{n}.txt").write_text(f"text {n}")
    (tmp_path / "mine.py").write_text(blocks()[-1])
    root = pathlib.Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "TFDS_DATA_DIR": str(tmp_path / "data")}
    subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, env=environment, check=True, timeout=120)
    train, held_out = (open_text("mine", split, tmp_path / "data") for split in ("train", "validation"))
    assert len(train) + len(held_out) == 60 and 0 < len(held_out) < 12
    texts = {record["text"].decode() for source in (train, held_out) for record in map(dict, source)}
    assert texts == {f"text {n}" for n in range(60)}
