"""The goodput simulator and its calibration as programs: what they write, and what they refuse."""

import json
import subprocess
import sys

import pytest

from ddiloco.config import build
from ddiloco.goodput.failures import FailureModel
from experiments.cli import program
from experiments.studies.goodput.simulator import Simulation
from tests.integration.programs import ROOT
from tests.refusals import assert_refused

SMALL = (
    "--config.num_chips=(150000,600000)",
    "--config.systems='data_parallel','elastic_data_parallel','decoupled:4'",
    "--config.days=0.1",
    "--config.seeds=2",
)
CAUSES = ["detecting", "failed", "reconfiguring", "replaying", "skipping", "standby"]
CAUSES += ["waiting_for_network", "waiting_for_peers"]


def test_the_committed_config_is_the_failure_models_defaults():
    simulation = build(Simulation, program.load_config("configs/goodput.py"))
    assert simulation.failures == FailureModel()
    assert simulation.quorum is None
    assert len(simulation.num_chips) * len(simulation.systems) == 30


def test_a_grid_is_told_in_a_table_in_json_and_in_pictures(programs, tmp_path):
    output = tmp_path / "new" / "goodput.json"
    done = programs.run("simulate", *SMALL, "--config.quorum=3", f"--output={output}")
    assert (done.returncode, done.stderr) == (0, "")
    cells = json.loads(output.read_text())["cells"]
    kinds = [("data_parallel", 1), ("elastic_data_parallel", 1), ("decoupled", 4)]
    assert [(c["system"], c["num_learners"], c["num_chips"]) for c in cells] == [
        (*kind, chips) for kind in kinds for chips in (150_000, 600_000)
    ]
    for cell in cells:
        assert sorted(cell["lost"]) == CAUSES
        assert cell["goodput"] + sum(cell["lost"].values()) == pytest.approx(1.0)
        assert 0.0 < cell["goodput"] <= cell["uptime"] <= 1.0
        assert 0.0 <= cell["ci95"] < 0.5
        assert (cell["quorum_uptime"] is not None) == (cell["system"] == "decoupled")
        assert f"{cell['goodput']:.2%}" in done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) == 2 + len(cells) + 1
    titles = [title.strip() for title in lines[0].split("|")]
    assert titles[1:7] == ["system", "chips", "goodput", "+-", "uptime", "quorum"]
    for name in ("goodput", "attribution", "uptime"):
        assert (tmp_path / "new" / f"goodput_{name}.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(output.parent.iterdir())) == 4


def test_the_same_settings_give_the_same_bytes(programs, tmp_path):
    texts = []
    for name in "ab":
        output = tmp_path / f"{name}.json"
        assert programs.run("simulate", *SMALL, f"--output={output}").returncode == 0
        texts.append(output.read_bytes())
    assert texts[0] == texts[1]
    assert b"\r" not in texts[0]


BAD = {
    "fewer slices than learners": (
        ["num_chips=512", "systems=decoupled:4"],
        "config.num_chips: 512 chips are 2 slices of 256, but 4 learners need at least one each",
    ),
    "less than a slice": (
        ["num_chips=255", "systems=data_parallel"],
        "config.num_chips: 255 chips are 0 slices of 256, but 1 learner needs at least one each",
    ),
    "quorum above learners": (
        ["quorum=3", "systems=decoupled:2"],
        "config.quorum: is 3, but must be at most the learners of decoupled:2",
    ),
    "no learners": (["systems=decoupled:0"], "config.systems: is 'decoupled:0', but must be data_parallel, "),
    "unknown system": (["systems=spmd"], "config.systems: is 'spmd', but must be data_parallel, elastic_"),
}


@pytest.mark.parametrize(("overrides", "told"), BAD.values(), ids=BAD)
def test_an_impossible_fleet_is_told_in_one_line(overrides, told, programs, tmp_path):
    output = tmp_path / "out.json"
    done = programs.run("simulate", *[f"--config.{one}" for one in overrides], f"--output={output}")
    assert_refused(done, told)
    assert not output.exists()


@pytest.mark.parametrize(
    ("output", "told"),
    [("file/out.json", "{}/file is there, and is no folder"), ("d.json", "Is a directory")],
)
def test_an_output_that_cannot_be_written_is_told_before_anything_is_simulated(
    output, told, programs, tmp_path
):
    (tmp_path / "file").touch()
    (tmp_path / "d.json").mkdir()
    done = programs.run("simulate", *SMALL, f"--output={tmp_path / output}")
    assert_refused(done, f"output: {tmp_path / output}: {told.format(tmp_path)}")


def test_the_calibration_prints_values_cells_and_errors(programs):
    done = programs.run("calibrate", "--days=0.2")
    assert (done.returncode, done.stderr) == (0, "")
    for told in ("downscale_seconds", "spare_share", "committed", "decoupled:16", "predicted", "largest"):
        assert told in done.stdout
    assert_refused(programs.run("calibrate", "--days=-1"), "days: is -1.0, but must be at least 0")


def test_the_simulator_starts_without_jax():
    studies = "experiments.studies"
    program = f"import experiments.simulate, {studies}.goodput.simulator, {studies}.figures, sys; "
    program += "sys.exit('jax' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
