"""The claim of configs/vit.py:tiny, run in full; minutes, so not among the quick tests."""

import threading

import pytest

from ddiloco.run.job import run_job
from ddiloco.settings.experiment import parse
from experiments.cli import program
from tests import workbench


@pytest.mark.slow
def test_four_learners_classify_at_least_96_percent_of_held_out_digits(tmp_path):
    config = program.load_config("configs/vit.py:tiny")
    assert (config.algorithm, config.sync.num_learners) == ("decoupled", 4)
    config.driver = "virtual"
    config.data.data_dir = str(tmp_path / "tfds")
    with workbench.devices(1):
        result = run_job(parse(config), tmp_path / "run", threading.Event())
    assert result.failure is None
    assert result.summary["eval_accuracy"] >= 0.96
