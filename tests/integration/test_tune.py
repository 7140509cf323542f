"""`experiments.tune`, from a plan to its tables, and again without a run."""

import json
import pathlib

import pytest

from tests.refusals import assert_refused

PLAN = """
def get_tuning():
    row = {"preset": "dense,data_parallel", "train.steps": 6, "axes": ["inner.learning_rate"]}
    adamw = {**row, "label": "AdamW", "inner.learning_rate": 0.003}
    muon = {**row, "label": "Muon", "inner.learning_rate": 0.006, "inner.optimizer": "muon"}
    return {
        "rows": [adamw, {**muon, "against": "AdamW"}],
        "grid": {"inner.learning_rate": (0.003, 0.006)},
        "budget": 2,
        "choosing": {"data.train_split": "train[:90%]", "data.eval_split": "train[90%:]"},
    }
"""
SMALL = {"model.num_layers": 1, "train.batch_size": 2, "eval.batch_size": 4, "data.sequence_length": 64}


@pytest.mark.slow
def test_rows_are_tuned_alike_and_compared_on_what_chose_nothing(programs, tmp_path):
    plan = tmp_path / "plan.py"
    plan.write_text("from configs.micro import get_config\n" + PLAN)
    small = [f"--config.{name}={value}" for name, value in SMALL.items()]
    arguments = [f"--config={plan}", f"--output={tmp_path}/out", "--seeds=1", *small]
    first = programs.finish(programs.start("tune", *arguments), 600)
    assert first.returncode == 0, first.stderr
    adamw, muon = json.loads((tmp_path / "out" / "chosen.json").read_text())
    for row in (adamw, muon):
        assert {tried["inner.learning_rate"] for tried in row["tried"]} == {0.003, 0.006}
        lowest = min(row["tried"], key=lambda tried: tried["loss"])
        assert row["best"] == {"inner.learning_rate": lowest["inner.learning_rate"]}
        assert row["at_edge"] == ["inner.learning_rate"]
    folder = (
        tmp_path / "out" / "reported" / "Muon" / f"inner.learning_rate={muon['best']['inner.learning_rate']}"
    )
    config = json.loads((folder / "seed=1" / "config.json").read_text())
    assert (config["inner"]["optimizer"], config["data"]["eval_split"]) == ("muon", "validation")
    assert "(edge)" in (tmp_path / "out" / "chosen.md").read_text()
    table = (tmp_path / "out" / "tune.md").read_text()
    assert "| AdamW" in table
    one, other = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert (one["seed"], one["gap"], other["seed"]) == (1, None, 1)
    assert other["gap"] == pytest.approx(other["eval_loss"] / one["eval_loss"] - 1)
    assert (tmp_path / "out" / "tune.png").read_bytes().startswith(b"\x89PNG")

    again = programs.run("tune", *arguments)
    assert again.returncode == 0 and "[1/" not in again.stderr + again.stdout
    assert (tmp_path / "out" / "tune.md").read_text() == table


def test_a_run_that_fails_while_it_is_chosen_is_told_at_the_end(programs, tmp_path):
    lives = "time,learner,event\n" + "".join(f"2,{m},fail\n" for m in range(4))
    (tmp_path / "availability.csv").write_text(lives)
    plan = tmp_path / "plan.py"
    plan.write_text(f"""
from configs.micro import get_config

def get_tuning():
    row = {{"label": "counted", "preset": "dense,decoupled", "virtual.arrays": False, "sync.interval": 4}}
    choosing = {{"virtual.availability": "trace", "virtual.trace": {str(tmp_path / "availability.csv")!r}}}
    grid = {{"sync.interval": (4,)}}
    return {{"rows": [{{**row, "axes": ["sync.interval"]}}], "grid": grid, "budget": 1, "choosing": choosing}}
""")
    arguments = [f"--config={plan}", f"--output={tmp_path}/out", "--seeds=1", "--config.train.steps=12"]
    done = programs.run("tune", *arguments)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "1 of the runs failed: counted sync.interval=4, seed 100 (it has not finished)\n"
    )
    [row] = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert row["label"] == "counted"


def test_what_is_tuned_is_not_set_for_all_runs(programs, tmp_path):
    plan = tmp_path / "plan.py"
    plan.write_text("from configs.micro import get_config\n" + PLAN)
    made = pathlib.Path("runs/tune-plan")  # where nothing else is asked for
    assert not made.exists()
    done = programs.run("tune", f"--config={plan}", "--config.inner.learning_rate=3")
    assert_refused(done, "config.inner.learning_rate: is set for 'AdamW', but it is tuned")
    assert not made.exists()


def test_a_seed_that_chooses_is_not_reported(programs, tmp_path):
    done = programs.run("tune", "--config=configs/micro.py", "--tuning_seeds=1", f"--output={tmp_path}")
    assert_refused(done, "tuning_seeds: a seed that chooses must not be reported")
    assert not list(tmp_path.iterdir())
