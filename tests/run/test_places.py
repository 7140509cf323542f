"""Where a run will write is tried at its start, and the room there held against what it saves."""

import json
import re

import pytest

from ddiloco.config import ConfigError
from ddiloco.run import job, places
from ddiloco.run.recipes import assembly_of
from tests import workbench
from tests.refusals import assert_refused, refusal
from tests.small_disks import fill, small_disk
from tests.virtual_runs import run_job


def made(data_dir, **groups):
    experiment = workbench.experiment(data_dir, **groups)
    return experiment, assembly_of(experiment)


def written(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_what_is_saved_is_told_by_folder(data_dir):
    params = 4 * made(data_dir)[1].num_params
    for driver in ("local", "remote"):
        saved = places.saved_bytes(*made(data_dir, driver=driver))
        assert saved.keys() == {"checkpoints", "syncer"} and saved["checkpoints"] == params
        assert saved["syncer"] >= 2 * params
    assert places.saved_bytes(*made(data_dir, driver="virtual")) == {"checkpoints": params}
    two, three = (
        places.saved_bytes(*made(data_dir, snapshot={"every": 4}, sync={"num_learners": n}))["snapshots"]
        for n in (2, 3)
    )
    assert three - two >= 3 * params  # parameters and AdamW's two moments of one more learner


def test_a_run_saves_as_much_as_is_told(data_dir, tmp_path, one_device):
    experiment, assembly = made(data_dir, driver="local", snapshot={"every": 4}, train={"steps": 8})
    assert run_job(experiment, tmp_path).failure is None
    for name, needed in places.saved_bytes(experiment, assembly).items():
        files = list((tmp_path / name).glob("fragment-*")) if name == "syncer" else None
        newest = files or [max((tmp_path / name).glob("[0-9]*"), key=lambda path: int(path.name))]
        size = sum(path.stat().st_size if path.is_file() else written(path) for path in newest)
        assert needed <= 1.1 * size, name
        assert size < 1.5 * needed + (1 << 17), name


@pytest.mark.parametrize("driver", ["local", "virtual"])
def test_a_disk_without_the_room_is_refused_with_both_numbers_before_anything_is_trained(
    driver, data_dir, tmp_path, one_device
):
    experiment, assembly = made(data_dir, driver=driver)
    needed = sum(places.saved_bytes(experiment, assembly).values())
    with small_disk(tmp_path / "small", "2m") as small:
        fill(small / "ballast", leave=needed // 2)
        told = refusal(ConfigError, run_job, experiment, small / "run")
        assert not (small / "run" / "config.json").exists()
    assert told.startswith(f"workdir: {small / 'run'}: has ")
    free = int(re.search(r"\(([\d,]+) bytes\) free", told)[1].replace(",", ""))
    assert needed // 4 < free < needed  # the lock has a block
    assert f"({needed:,} bytes)" in told and "of checkpoints" in told


@pytest.mark.parametrize("name", ["checkpoints", "syncer", "learners/1", "tape"])
def test_a_file_in_a_folder_s_place_is_found_where_a_run_goes_on_and_the_other_way_round(
    name, data_dir, tmp_path
):
    experiment, _ = made(data_dir)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    told = refusal(ConfigError, job._write_settings, tmp_path, experiment, resume=True)
    assert told.endswith(f"cannot be written to: {tmp_path / name} is there, and is no folder")
    (tmp_path / name).unlink()
    (tmp_path / "rounds.jsonl").mkdir()
    told = refusal(ConfigError, job._write_settings, tmp_path, experiment, resume=True)
    assert told.endswith(f"{tmp_path}/rounds.jsonl is there, and is a folder")


def test_a_run_that_begins_sets_aside_what_is_in_its_way(data_dir, tmp_path):
    for name in ("checkpoints", "summary.json"):
        (tmp_path / name).symlink_to("nowhere")
    job._write_settings(tmp_path, made(data_dir)[0], resume=False)
    assert all((tmp_path / "previous" / "1" / name).is_symlink() for name in ("checkpoints", "summary.json"))


WAYS = {
    "file": "{0}/file is there, and is no folder",
    "dangling": "{0}/dangling is a link to nowhere, which is not there",
    "set": "cannot be written to: {0}/set/previous is there, and is no folder",
}


@pytest.fixture
def place(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "previous").touch()
    return tmp_path


@pytest.mark.parametrize(("driver", "name"), [("local", "set"), ("remote", "file")])
def test_a_workdir_that_cannot_be_is_refused_before_training(driver, name, place, programs):
    done = programs.train(place / name, f"--config.driver={driver}", "--config.log.page=")
    assert_refused(done, f"workdir: {place / name}: {WAYS[name].format(place)}\n")


@pytest.mark.parametrize(
    ("program", "given", "flag"),
    [
        ("syncer", ["--workdir=PLACE", "--listen=127.0.0.1:0"], "workdir"),
        ("sweep", ["--output=PLACE", "--sweep=seed=0,1"], "output"),
        ("chaos", ["--workdir=PLACE"], "workdir"),
        ("compile", ["--table=PLACE/x.md"], "table"),
        ("tokenize", ["--output=PLACE/x"], "output"),
        (
            "learner",
            ["--learner_id=0", "--config.recovery.checkpoint_folder=PLACE"],
            "config.recovery.checkpoint_folder",
        ),
    ],
)
def test_no_program_begins_what_it_could_not_write(program, given, flag, place, programs):
    name = "dangling" if program == "sweep" else "file"
    done = programs.run(program, *(word.replace("PLACE", str(place / name)) for word in given))
    told = WAYS[name].format(place)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {flag}: {place / name}") and told in line


@pytest.mark.slow
def test_a_folder_of_the_home_folder_and_one_with_brackets_have_all_that_a_run_leaves(programs, tmp_path):
    name = "run [1] *é"
    settings = ["--config.snapshot.every=6", "--config.log.page="]
    given = [word for word in programs.training(tmp_path) if not word.startswith("--workdir")]
    for program, arguments in {
        "train": [*given, *settings, f"--workdir=~/{name}"],
        "replay": [f"--workdir=~/{name}"],
        "evaluate": [f"--checkpoint=~/{name}", "--output=~/[1].json"],
        "export": [f"--workdir=~/{name}", "--to=~/ex [1]"],
        "report": [f"--workdir=~/{name}", "--output=~/[1].html"],
    }.items():
        process = programs.start_module(f"experiments.{program}", *arguments, HOME=str(tmp_path))
        done = programs.finish(process)
        assert done.returncode == 0, (program, done.stderr)
    assert json.loads((tmp_path / "[1].json").read_text())["step"] == 12
    assert {name, "[1].json", "[1].html", "ex [1]"} <= {path.name for path in tmp_path.iterdir()}
