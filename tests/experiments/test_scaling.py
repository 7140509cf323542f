"""The scaling study's program, on the losses of a known law; and the sweep that it is meant for."""

import json
import math

import numpy as np
import pytest

from configs.sweeps import scaling as study
from tests.refusals import assert_refused


def rows_of(noise=0.0):
    """What a sweep of the study would leave, if losses followed the law of `sum`."""
    rng = np.random.default_rng(0)
    rows = []
    for point in study.get_sweep("loss"):
        size = tuple(point[f"model.{name}"] for name in ("num_layers", "model_dim", "mlp_dim"))
        n = study.parameters(size)
        d = point["train.steps"] * study.ROWS * study.LENGTH
        m = point["sync.num_learners"] if point["algorithm"] == "decoupled" else 0.5
        loss = (60 * n**-0.4 + 250 * d**-0.45 + 1.2) * m**0.02 * math.exp(noise * rng.standard_normal())
        rows.append({**point, "eval_loss": loss, "num_params": n, "tokens_total": d - int(rng.integers(9))})
    return rows


@pytest.fixture(scope="module")
def told(programs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    rates = []
    for point in study.get_sweep("inner"):
        size = tuple(point[f"model.{name}"] for name in ("num_layers", "model_dim", "mlp_dim"))
        n, d = study.parameters(size), point["train.steps"] * study.ROWS * study.LENGTH
        best = 0.4 * n**-0.3 * point["sync.num_learners"] ** 0.1
        loss = 3 + 0.05 * math.log(point["inner.learning_rate"] / best) ** 2
        rates.append({**point, "eval_loss": loss, "num_params": n, "tokens_total": d})
    for name, rows in (("loss", [*rows_of(0.003), {"eval_loss": None}]), ("inner", rates)):
        (folder / name).mkdir()
        (folder / name / "sweep.json").write_text(json.dumps(rows))
    sweeps = f"--sweep={folder}/loss,{folder}/inner"
    done = programs.run("scaling", sweeps, f"--output={folder}/out", "--draws=1")
    assert done.returncode == 0, done.stderr
    return folder / "out", done.stdout


def test_the_law_that_the_losses_follow_is_found_and_foretells_the_largest_size_best(told):
    found = {law["name"]: law for law in json.loads((told[0] / "scaling.json").read_text())["laws"]}
    assert found["sum"]["parameters"]["alpha"] == pytest.approx(-0.4, abs=0.05)
    assert found["sum"]["parameters"]["beta"] == pytest.approx(0.02, abs=0.005)
    low, high = found["sum"]["intervals"]["beta"]
    assert low <= high
    errors = {name: law["held_out"]["error"] for name, law in found.items()}
    assert errors["sum"] < 0.01 < errors["power"]
    assert set(found) >= {"data-parallel", "M=1 alone", "M=8 alone"}


def test_gaps_are_those_to_data_parallel(told):
    rows = json.loads((told[0] / "scaling.json").read_text())["losses"]
    gaps = {m: [row["gap"] for row in rows if row["learners"] == m] for m in (0, 1, 8)}
    assert set(gaps[0]) == {None} and len(gaps[8]) == 12
    assert np.mean(gaps[8]) == pytest.approx(16**0.02 - 1, abs=0.005)


def test_the_best_rates_follow_their_law(told):
    ours, theirs = json.loads((told[0] / "scaling.json").read_text())["hyperparameters"]
    assert ours["parameters"] == pytest.approx({"A": 0.4, "alpha": -0.3, "beta": 0.1}, rel=1e-3)
    assert theirs["data_parallel"] and theirs["parameters"]["alpha"] == pytest.approx(-0.3, rel=1e-3)
    assert ours["intervals"] is None  # one seed


def test_tables_and_a_figure_tell_the_same(told):
    output, text = told
    assert (output / "scaling.md").read_text().strip() in text
    assert "1 runs had no loss and are left out." in text
    assert "The gap of M = 2, 4, 8 goes by " in text
    assert "| gap at N=2e+09 " in text
    assert (output / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_fitted_is_told_and_the_rest_is_there(programs, tmp_path):
    rows = [row for row in rows_of() if row["model.model_dim"] <= 32 and row["algorithm"] == "decoupled"]
    (tmp_path / "sweep.json").write_text(json.dumps(rows))
    done = programs.run("scaling", f"--sweep={tmp_path}", f"--output={tmp_path}/out", "--draws=1")
    assert done.returncode == 0, done.stderr
    needs = "A N^alpha M^beta + E: needs 3 values of N, but there are 2"
    assert f"Not determined: floor: {needs}.\n" in done.stdout
    assert "| power | A N^alpha M^beta |" in done.stdout
    assert "Not determined: gap: needs runs with several learners, and of data-parallel beside" in done.stdout


WRONG = {
    "no sweep": (["--sweep=FOLDER/none"], "sweep: FOLDER/none/sweep.json: No such file or directory"),
    "no runs": (["--sweep=FOLDER/empty"], "sweep: the sweep has no loss: of 0 runs none has one"),
}


@pytest.mark.parametrize(("arguments", "told"), WRONG.values(), ids=WRONG)
def test_a_usage_error_is_one_line(arguments, told, programs, tmp_path):
    for name, text in (("bad", "{"), ("empty", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sweep.json").write_text(text)
    arguments = [argument.replace("FOLDER", str(tmp_path)) for argument in arguments]
    done = programs.run("scaling", *arguments, f"--output={tmp_path}/out")
    assert_refused(done, told.replace("FOLDER", str(tmp_path)))
