"""Baselines go on from their snapshots as if they had never stopped, in wall-clock and in virtual time."""

import json
import threading

import numpy as np
import pytest

from ddiloco.baselines.virtual import run_virtual_baseline
from ddiloco.baselines.wall import run_baseline
from ddiloco.disk.snapshots.one_job import JobSnapshots
from ddiloco.disk.snapshots.store import FOLDER, Part, SnapshotStore
from ddiloco.observe import records
from ddiloco.outer.global_model import parameters_sha256
from ddiloco.settings.experiment import parse, to_json
from tests.virtual_runs import shared_workshop, virtual
from tests.workbench import experiment

SNAPSHOTS = {"every": 5, "keep": 9}
FAILURES = {  # of 8 chips one fails every 5 virtual seconds or so
    "mtbi_years": 1.3e-6,
    "chips_per_slice": 2,
    "detection_seconds": 1.0,
    "downscale_seconds": 2.0,
    "upscale_wait_seconds": 3.0,
    "upscale_seconds": 1.0,
    "return_seconds": 4.0,
    "restart_seconds": 4.0,
    "spare_share": 0.25,
    "step_seconds": 0.0,
}


@pytest.fixture(scope="module")
def workshop():
    return shared_workshop()


def run(workshop, settings, workdir=None, snapshot=None, stop_after=None):
    """The outcome of a baseline, and what it recorded; stopped once so many steps are recorded."""
    taken, stop = [], threading.Event()

    def record(one):
        taken.append(one)
        if isinstance(one, records.StepDone) and one.step == stop_after:
            stop.set()

    runner = run_virtual_baseline if settings.driver == "virtual" else run_baseline
    with workshop.open():
        return runner(workshop.assembly(settings), record, stop, workdir, snapshot), taken


def steps(taken):
    return [(one.step, one.tokens) for one in taken if isinstance(one, records.StepDone)]


def nobody_warns(told):
    raise AssertionError(told)


def newest(workdir):
    return SnapshotStore(workdir / FOLDER, keep=9).newest(nobody_warns)


@pytest.mark.parametrize("algorithm", ["data_parallel", "lone_learner"])
def test_a_job_goes_on_as_if_it_had_never_stopped(workshop, data_dir, tmp_path, algorithm):
    settings = experiment(data_dir, algorithm, snapshot=SNAPSHOTS)
    whole, taken = run(workshop, settings)
    run(workshop, settings, tmp_path, stop_after=7)
    snapshot = newest(tmp_path)
    assert (snapshot.number, snapshot.header["step"], snapshot.parts) == (1, 5, ("job",))
    resumed, after = run(workshop, settings, tmp_path, snapshot)
    assert parameters_sha256(resumed.params) == parameters_sha256(whole.params)
    assert (resumed.step, resumed.eval_loss) == (whole.step, whole.eval_loss)
    assert steps(after) == steps(taken)[5:]
    assert newest(tmp_path).header["step"] == 10
    again, _ = run(workshop, settings, None, newest(tmp_path))
    assert parameters_sha256(again.params) == parameters_sha256(whole.params)


def test_the_steps_before_a_snapshots_time_are_those_it_follows_from(workshop, data_dir, tmp_path):
    settings = experiment(data_dir, "lone_learner", snapshot=SNAPSHOTS, train={"steps_in_flight": 3})
    _, taken = run(workshop, settings, tmp_path)
    done = [one for one in taken if isinstance(one, records.StepDone)]
    header = SnapshotStore(tmp_path / FOLDER, keep=9).open(1).header
    assert (header["step"], sum(one.time < header["time"] for one in done)) == (5, 5)


@pytest.mark.parametrize("algorithm", ["data_parallel", "elastic_data_parallel"])
def test_a_job_in_virtual_time_resumes_exactly_with_its_failures_and_scores(
    workshop, data_dir, tmp_path, algorithm
):
    hard = {"step_variation": 0.3, "lives": "failures", "failures": FAILURES}
    settings = virtual(data_dir, algorithm, virtual=hard, eval={"every": 2}, snapshot=SNAPSHOTS)
    whole, taken = run(workshop, settings)
    assert len({one.state for one in taken if isinstance(one, records.StateChanged)}) > 2
    quiet, _ = run(workshop, settings, tmp_path)
    assert parameters_sha256(quiet.params) == parameters_sha256(whole.params)
    for number, step in ((1, 5), (2, 10)):
        snapshot = SnapshotStore(tmp_path / FOLDER, keep=9).open(number)
        resumed, after = run(workshop, settings, None, snapshot)
        assert snapshot.header["step"] == step
        assert parameters_sha256(resumed.params) == parameters_sha256(whole.params)
        for kind, lines in ((records.StateChanged, "states"), (records.StepDone, "steps")):
            count = snapshot.header["records"][lines]
            count = count["0"] if lines == "steps" else count
            assert plain(after, kind) == plain(taken, kind)[count:]
        scored = len(snapshot.header["summary"]["eval_history"])
        assert plain(after, records.Evaluated) == plain(taken, records.Evaluated)[scored:]


def plain(taken, kind):
    """The records of a kind, without what is on the devices."""
    return [
        {name: value for name, value in vars(one).items() if name != "metrics"}
        if hasattr(one, "__dict__")
        else one
        for one in taken
        if isinstance(one, kind)
    ]


def test_other_learners_take_over_the_data_of_a_data_parallel_job(workshop, data_dir, tmp_path):
    run(workshop, experiment(data_dir, "data_parallel", snapshot=SNAPSHOTS), tmp_path, stop_after=6)
    snapshot = newest(tmp_path)
    told = snapshot.part("job").state["position"]
    assert sorted(told["shards"]) == ["0", "1"]
    settings = experiment(data_dir, "data_parallel", sync={"num_learners": 4}, train={"batch_size": 1})
    resumed, after = run(workshop, settings, None, snapshot)
    assert resumed.finished
    assert [step for step, _ in steps(after)] == list(range(6, 13))


def test_a_whole_run_is_resumed_with_its_records(workshop, data_dir, tmp_path):
    settings = virtual(data_dir, "data_parallel", eval={"every": 4}, snapshot=SNAPSHOTS)
    whole = workshop.job(settings, tmp_path / "whole").summary
    half = {**to_json(settings), "train": {**to_json(settings)["train"], "steps": 12}}
    workshop.job(settings, tmp_path / "cut")
    resumed = workshop.job(parse({**half, "resume": True}), tmp_path / "cut").summary
    for name in ("params_sha256", "eval_history", "inner_steps", "tokens", "goodput", "eval_loss"):
        assert resumed[name] == whole[name], name
    lines = (tmp_path / "cut" / "learners" / "0" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 13))


def test_a_disk_that_refuses_costs_a_snapshot_and_is_told(data_dir, tmp_path):
    taken = []
    (tmp_path / FOLDER).write_text("a file where a folder should be")
    snapshots = JobSnapshots(
        tmp_path, experiment(data_dir, "data_parallel", snapshot=SNAPSHOTS), taken.append
    )
    snapshots.take(Part({"params/w": np.zeros(3)}, {}), {"step": 5, "time": 1.0}, wait=True)
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
    snapshots.take(Part({}, {}), {"step": 5, "time": 1.0})
    snapshots.take(Part({}, {}), {"step": 10, "time": 2.0})
    go.set()
    snapshots.close(10.0)
    assert [(one.name, one.values["step"]) for one in taken] == [("snapshot_given_up", 10)]


@pytest.mark.parametrize("change", [{"snapshot": {"every": 4}}, {"resume": True}])
def test_a_baseline_that_is_only_timed_has_no_snapshots(data_dir, change):
    told = to_json(virtual(data_dir, "data_parallel", virtual={"arrays": False}))
    with pytest.raises(ValueError, match=r"config\.(snapshot\.every: is 4|resume: is True), but must be"):
        parse({**told, **change})


def test_without_a_workdir_there_are_none(data_dir, tmp_path):
    settings = experiment(data_dir, "data_parallel", snapshot=SNAPSHOTS)
    assert JobSnapshots(tmp_path, settings, print).due(5)
    assert not JobSnapshots(tmp_path, settings, print).due(6)
    assert not JobSnapshots(None, settings, print).due(5)
