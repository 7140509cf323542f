"""A baseline goes on from its checkpoint or a snapshot as if it had never stopped."""

import json
import threading

import pytest

from ddiloco.baselines.wall import BaselineRun
from ddiloco.outer.global_model import parameters_sha256
from ddiloco.run.recipes import assembly_of
from ddiloco.run.rollback import going_on
from ddiloco.storage.snapshots import FOLDER, SnapshotStore
from ddiloco.telemetry import records
from tests.virtual_runs import run_job
from tests.workbench import devices, experiment

SNAPSHOTS = {"every": 5, "keep": 9}


def run(settings, workdir=None, stop_after=None, comes_back=False):
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
        return BaselineRun(assembly_of(settings), record, stop, workdir, lambda: comes_back).run(), taken


def steps(taken):
    return [(one.step, one.tokens) for one in taken if isinstance(one, records.StepDone)]


@pytest.mark.parametrize("algorithm", ["data_parallel", pytest.param("lone_learner", marks=pytest.mark.slow)])
def test_a_job_goes_on_from_its_checkpoint_and_from_a_snapshot_as_if_it_had_never_stopped(
    data_dir, tmp_path, algorithm
):
    settings = experiment(data_dir, algorithm, snapshot=SNAPSHOTS, eval={"every": 4})
    whole, taken = run(settings)
    stopped, before = run(settings, tmp_path, stop_after=7)
    resumed, after = run(settings, tmp_path)
    assert parameters_sha256(resumed.params) == parameters_sha256(whole.params)
    assert (resumed.step, resumed.eval_loss) == (whole.step, whole.eval_loss)
    assert steps(before) + steps(after) == steps(taken) and stopped.step < 12
    store = SnapshotStore(tmp_path / FOLDER, keep=9)
    begins = store.open(1).header.step
    assert 5 <= begins <= stopped.step
    assert going_on(1, tmp_path, settings, print)
    again, after = run(settings, tmp_path)
    assert parameters_sha256(again.params) == parameters_sha256(whole.params)
    assert steps(after) == steps(taken)[begins:]


def test_a_job_that_comes_back_is_scored_at_its_end_alone(data_dir, tmp_path):
    settings = experiment(data_dir, "data_parallel", eval={"every": 0})
    scored = []
    for stop_after in (3, None):
        outcome, taken = run(settings, tmp_path, stop_after, comes_back=True)
        scored += [one.step for one in taken if isinstance(one, records.Evaluated)]
        assert (outcome.eval_loss is None) is (stop_after is not None)
    assert scored == [0, 12] and outcome.finished


def test_other_learners_take_over_the_data_of_a_data_parallel_job(data_dir, tmp_path):
    stopped, _ = run(experiment(data_dir, "data_parallel"), tmp_path, stop_after=6)
    settings = experiment(data_dir, "data_parallel", sync={"num_learners": 4}, train={"batch_size": 1})
    resumed, after = run(settings, tmp_path)
    assert resumed.finished
    assert [step for step, _ in steps(after)] == list(range(stopped.step + 1, 13))


def test_a_whole_run_is_resumed_with_its_records(data_dir, tmp_path):
    settings = experiment(data_dir, "data_parallel", eval={"every": 4}, snapshot=SNAPSHOTS)
    whole = run_job(settings, tmp_path).summary
    told = []
    assert going_on(1, tmp_path, settings, told.append)
    resumed = run_job(settings, tmp_path, resume=True).summary
    for name in ("params_sha256", "inner_steps", "tokens", "eval_loss"):
        assert resumed[name] == whole[name], name
    scores = [[(score["step"], score["loss"]) for score in run["eval_history"]] for run in (whole, resumed)]
    assert scores[0] == scores[1]
    lines = (tmp_path / "learners" / "0" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 13))
    step = SnapshotStore(tmp_path / FOLDER, keep=9).open(1).header.step
    assert told == [f"going on from snapshot 1, step {step}; the rest is in {tmp_path}/previous/1"]


def test_a_disk_that_refuses_costs_a_snapshot_and_is_told(data_dir, tmp_path):
    (tmp_path / FOLDER).write_text("a file where a folder should be")
    done, taken = run(experiment(data_dir, "data_parallel", snapshot=SNAPSHOTS), tmp_path)
    assert done.finished
    given_up = [one.values["step"] for one in taken if isinstance(one, records.Noted)]
    assert given_up == [5, 10]
    alarms = [one.sentence for one in taken if isinstance(one, records.Alarm)]
    assert alarms[0].endswith("a snapshot is given up; training continues")
