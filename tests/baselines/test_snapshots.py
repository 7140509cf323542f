"""A baseline goes on from its snapshot as if it had never stopped."""

import dataclasses
import json
import threading

import numpy as np
import pytest

from ddiloco.baselines.wall import BaselineRun, JobSnapshots
from ddiloco.outer.global_model import parameters_sha256
from ddiloco.run.recipes import assembly_of
from ddiloco.storage.snapshots.store import FOLDER, SnapshotPart, SnapshotStore
from ddiloco.telemetry import records
from tests.virtual_runs import run_job
from tests.workbench import devices, experiment

SNAPSHOTS = {"every": 5, "keep": 9}


def run(settings, workdir=None, snapshot=None, stop_after=None):
    """The outcome of a baseline, and what it recorded; stopped once so many steps are recorded."""
    taken, stop = [], threading.Event()

    def record(one):
        if isinstance(one, records.Flush):
            one.done()
            return
        taken.append(one)
        if isinstance(one, records.StepDone) and one.step == stop_after:
            stop.set()

    with devices(1):
        return BaselineRun(assembly_of(settings), record, stop, workdir, snapshot).run(), taken


def steps(taken):
    return [(one.step, one.tokens) for one in taken if isinstance(one, records.StepDone)]


def nobody_warns(told):
    raise AssertionError(told)


def newest(workdir):
    return SnapshotStore(workdir / FOLDER, keep=9).newest(nobody_warns)


@pytest.mark.parametrize("algorithm", ["data_parallel", pytest.param("lone_learner", marks=pytest.mark.slow)])
def test_a_job_goes_on_as_if_it_had_never_stopped(data_dir, tmp_path, algorithm):
    settings = experiment(data_dir, algorithm, snapshot=SNAPSHOTS)
    whole, taken = run(settings)
    run(settings, tmp_path, stop_after=7)
    snapshot = newest(tmp_path)
    assert (snapshot.number, snapshot.header["step"], snapshot.parts) == (1, 5, ("job",))
    resumed, after = run(settings, tmp_path, snapshot)
    assert parameters_sha256(resumed.params) == parameters_sha256(whole.params)
    assert (resumed.step, resumed.eval_loss) == (whole.step, whole.eval_loss)
    assert steps(after) == steps(taken)[5:]
    assert newest(tmp_path).header["step"] == 10
    again, _ = run(settings, None, newest(tmp_path))
    assert parameters_sha256(again.params) == parameters_sha256(whole.params)


def test_the_steps_before_a_snapshots_time_are_those_it_follows_from(data_dir, tmp_path):
    settings = experiment(data_dir, "lone_learner", snapshot=SNAPSHOTS, train={"steps_in_flight": 3})
    _, taken = run(settings, tmp_path)
    done = [one for one in taken if isinstance(one, records.StepDone)]
    header = SnapshotStore(tmp_path / FOLDER, keep=9).open(1).header
    assert (header["step"], sum(one.time < header["time"] for one in done)) == (5, 5)


def test_other_learners_take_over_the_data_of_a_data_parallel_job(data_dir, tmp_path):
    run(experiment(data_dir, "data_parallel", snapshot=SNAPSHOTS), tmp_path, stop_after=6)
    snapshot = newest(tmp_path)
    told = snapshot.part("job").state["position"]
    assert sorted(told["shards"]) == ["0", "1"]
    settings = experiment(data_dir, "data_parallel", sync={"num_learners": 4}, train={"batch_size": 1})
    resumed, after = run(settings, None, snapshot)
    assert resumed.finished
    assert [step for step, _ in steps(after)] == list(range(6, 13))


def test_a_whole_run_is_resumed_with_its_records(data_dir, tmp_path):
    settings = experiment(data_dir, "data_parallel", eval={"every": 4}, snapshot=SNAPSHOTS)
    whole = run_job(settings, tmp_path).summary
    resumed = run_job(dataclasses.replace(settings, resume=True), tmp_path).summary
    for name in ("params_sha256", "inner_steps", "tokens", "eval_loss"):
        assert resumed[name] == whole[name], name
    scores = [[(score["step"], score["loss"]) for score in run["eval_history"]] for run in (whole, resumed)]
    assert scores[0] == scores[1]
    lines = (tmp_path / "learners" / "0" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 13))


def test_a_disk_that_refuses_costs_a_snapshot_and_is_told(data_dir, tmp_path):
    taken = []
    (tmp_path / FOLDER).write_text("a file where a folder should be")
    snapshots = JobSnapshots(
        tmp_path, experiment(data_dir, "data_parallel", snapshot=SNAPSHOTS), taken.append
    )
    snapshots.take(SnapshotPart({"params/w": np.zeros(3)}, {}), {"step": 5, "time": 1.0})
    snapshots.close(10.0)
    assert [type(one).__name__ for one in taken] == ["Noted", "Alarm"]
    assert (taken[0].name, taken[0].values["step"]) == ("snapshot_given_up", 5)
    assert "training goes on" in taken[1].sentence


def test_one_is_given_up_while_another_is_being_written(data_dir, tmp_path, monkeypatch):
    go, taken = threading.Event(), []
    snapshots = JobSnapshots(
        tmp_path, experiment(data_dir, "data_parallel", snapshot=SNAPSHOTS), taken.append
    )
    monkeypatch.setattr(snapshots, "_write", lambda *args: go.wait(60))
    snapshots.take(SnapshotPart({}, {}), {"step": 5, "time": 1.0})
    snapshots.take(SnapshotPart({}, {}), {"step": 10, "time": 2.0})
    go.set()
    snapshots.close(10.0)
    assert [(one.name, one.values["step"]) for one in taken] == [("snapshot_given_up", 10)]


def test_without_a_workdir_there_are_none(data_dir, tmp_path):
    settings = experiment(data_dir, "data_parallel", snapshot=SNAPSHOTS)
    assert JobSnapshots(tmp_path, settings, print).due(5)
    assert not JobSnapshots(tmp_path, settings, print).due(6)
    assert not JobSnapshots(None, settings, print).due(5)
