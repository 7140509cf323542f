"""Exports while a run goes on: whoever follows the manifest always finds a whole model, also after a kill."""

import json
import threading

import numpy as np
import pytest

from ddiloco.config import ConfigError
from ddiloco.run import exports
from ddiloco.run.job import run_job
from ddiloco.storage import checkpoints
from ddiloco.weights.initial import InitialWeights
from tests import workbench

pytestmark = pytest.mark.usefixtures("one_device")
STEPS = 24


def experiment(data_dir, **more):
    train = {"steps": STEPS, "min_step_seconds": [0.05, 0.05]}
    return workbench.experiment(data_dir, "diloco", train=train, export={"every": 4}, **more)


def newest(workdir):
    return json.loads((workdir / "export" / exports.NEWEST).read_text())


def params_of(e, workdir, folder):
    return dict(InitialWeights(e.model, workdir / "export" / folder))


def kept(workdir):
    return sorted(path.name for path in (workdir / "export").iterdir() if path.is_dir())


def test_whoever_follows_the_manifest_always_finds_a_whole_model(data_dir, tmp_path):
    e, over, seen, problems = experiment(data_dir), threading.Event(), {}, []

    def follow():
        while not over.wait(0.01):
            try:
                found = newest(tmp_path)
                if found["step"] not in seen:
                    seen[found["step"]] = params_of(e, tmp_path, found["folder"])
            except FileNotFoundError as error:
                if "newest.json" not in str(error):  # the first is not there yet
                    problems.append(error)

    reader = threading.Thread(target=follow)
    reader.start()
    try:
        assert run_job(e, tmp_path, threading.Event()).failure is None
    finally:
        over.set()
        reader.join()
    assert problems == [] and len(seen) > 1
    last = newest(tmp_path)
    assert (last["step"], last["folder"]) == (STEPS, f"{STEPS:08d}")
    trained = checkpoints.restore(tmp_path / "checkpoints").params
    workbench.assert_equal(params_of(e, tmp_path, last["folder"]), trained)
    names = kept(tmp_path)
    assert len(names) == min(exports.KEPT, len(names)) and names[-1] == last["folder"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["alarms"] == []


def test_a_run_that_goes_on_exports_after_its_newest_and_clears_what_a_kill_left(data_dir, tmp_path):
    stop = threading.Event()
    e = experiment(data_dir)
    stop.set()
    run_job(e, tmp_path, stop)
    folder = tmp_path / "export"
    (folder / ".new").mkdir(parents=True)
    (folder / ".new" / "model.safetensors").write_bytes(b"half")
    folder.joinpath("00000008").mkdir(exist_ok=True)  # complete, but killed before the manifest named it
    for older in ("00000001", "00000002", "00000003"):
        folder.joinpath(older).mkdir()
    assert run_job(e, tmp_path, threading.Event(), resume=True).failure is None
    assert newest(tmp_path)["step"] == STEPS
    assert ".new" not in kept(tmp_path) and len(kept(tmp_path)) == exports.KEPT
    assert all(np.isfinite(x).all() for x in params_of(e, tmp_path, newest(tmp_path)["folder"]).values())


def test_an_export_that_the_disk_refuses_is_an_alarm_and_the_run_goes_on(data_dir, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exports, "export", refuse)
    assert run_job(experiment(data_dir), tmp_path, threading.Event()).failure is None
    [alarm, *_] = json.loads((tmp_path / "summary.json").read_text())["alarms"]
    assert "an export failed: No space left on device" in alarm


@pytest.mark.parametrize(
    ("algorithm", "more", "problem"),
    [
        ("lone_learner", {}, "export.every: is 4, but must be 0 but for learners of driver local or remote"),
        ("decoupled", {"driver": "virtual"}, "export.every: is 4, but must be 0 but for learners of driver"),
    ],
)
def test_what_has_no_versions_on_disk_exports_none(data_dir, algorithm, more, problem):
    with pytest.raises(ConfigError, match=problem):
        workbench.experiment(data_dir, algorithm, export={"every": 4}, **more)


def test_a_model_that_transformers_does_not_have_is_refused_before_training(data_dir, tmp_path):
    e = workbench.experiment(data_dir, export={"every": 4}, model={"name": "moe", "num_experts": 2})
    with pytest.raises(ConfigError, match=r"config\.export\.every: the model cannot be exported: model\."):
        run_job(e, tmp_path, threading.Event())
