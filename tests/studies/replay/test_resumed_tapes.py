"""Tapes of runs that go on from a snapshot: they begin with it, and are done again from there."""

import dataclasses
import shutil
import threading

import pytest

from ddiloco.local.run import LocalRun
from ddiloco.run import job
from ddiloco.run.recipes import assembly_of
from ddiloco.run.rollback import going_on
from ddiloco.storage.tape.file import TapeError
from ddiloco.telemetry.files import read_json
from experiments.studies.replay import execution as replay
from experiments.studies.replay import timeline, what_if
from experiments.studies.replay.reading import read_run
from tests.local.stopped_runs import completed, newest, settings, state_of
from tests.workbench import devices

FEEDBACK = {"codec": "int4", "error_feedback": True}


def taped(data_dir, learners, steps):
    e = settings(data_dir, learners, outer=FEEDBACK, train={"steps": steps})
    return dataclasses.replace(e, tape=dataclasses.replace(e.tape, enabled=True))


def run_job(e, workdir, until=lambda told: False, resume=False):
    """Runs the experiment as a whole job; `until(record)` stops it."""

    def runner(assembly, record, stop):
        def heard(told):
            record(told)
            if until(told):
                stop.set()

        return LocalRun(assembly, heard, stop, workdir).run()

    with devices(1):
        assert job.run_job(e, workdir, threading.Event(), runner=runner, resume=resume).failure is None


def replayed(workdir, e):
    """The run in a folder done again."""
    plan = replay.make_plan(e, read_run(workdir))
    with devices(1):
        return replay.Replay(assembly_of(e), plan).run()


def assert_done_again(workdir, e):
    done = replayed(workdir, e)
    assert done.sha256 == read_json(workdir / "summary.json")["params_sha256"]
    assert done.merges == done.compared > 0


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def learners(request):
    return request.param


@pytest.fixture(scope="module")
def resumed(learners, data_dir, tmp_path_factory):
    """A run of two learners that goes on with as many or with three; its settings then, and with what."""
    workdir = tmp_path_factory.mktemp("resumed") / "run"
    run_job(taped(data_dir, 2, 1000), workdir, completed(1))
    snapshot = newest(workdir)
    works = [state_of(snapshot, m).header.work for m in (0, 1)]  # which may be among the oldest later
    ahead = max(work.clock for work in works)
    e = taped(data_dir, learners, ahead + 16)
    run_job(e, workdir, resume=going_on(int(snapshot.folder.name), workdir, e, print))
    return workdir, e, works


def test_a_run_that_goes_on_is_done_again_from_its_snapshot(resumed, learners):
    workdir, e, works = resumed
    tapes = read_run(workdir)
    if learners == 2:  # else its data are dealt to others, and it joins
        for m in (0, 1):
            resumed_with = tapes.learners[m][0].header.resumed
            assert resumed_with.work == works[m]
    assert_done_again(workdir, e)
    previous = workdir / "previous" / "1"
    [before] = replay.make_plan(replay.recorded_experiment(previous), read_run(previous)).merges
    assert before, "the whole of the tapes of the run before"


def test_what_it_went_on_with_is_kept_with_its_tapes_and_asked_for_by_name(resumed, learners, tmp_path):
    workdir, e, _ = resumed
    shutil.copytree(workdir / "tape", tmp_path / "tape")
    assert replayed(tmp_path, e).sha256 == read_json(workdir / "summary.json")["params_sha256"]
    damaged = tmp_path / "tape" / "began" / "syncer" / "fragment-0001"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1])
    with pytest.raises(TapeError, match=r"goes on with what cannot be read: .*fragment-0001: is damaged"):
        replayed(tmp_path, e)
    damaged.write_bytes(whole)
    if learners == 2:
        [state] = (tmp_path / "tape" / "began" / "learners" / "1").iterdir()
        state.unlink()
        with pytest.raises(TapeError, match=r"inner state \d+ of learner 1's process"):
            replayed(tmp_path, e)
    shutil.rmtree(tmp_path / "tape" / "began")
    with pytest.raises(TapeError, match="does not begin with the run: the tape before it is missing"):
        replayed(tmp_path, e)


def test_tapes_of_a_run_that_went_on_can_be_looked_at_and_asked_what_if(resumed):
    workdir, e, _ = resumed
    plan = replay.make_plan(e, read_run(workdir))
    lines = timeline.timeline(plan)
    of_syncer = [line.clock for line in lines if line.learner is None and line.clock is not None]
    assert len(of_syncer) > 50
    first = plan.first.header.state.versions
    assert all(clock.versions.get(p, 0) >= v for clock in of_syncer for p, v in enumerate(first))
    recorded = what_if.recorded(plan)
    same = what_if.what_if(plan, e.sync, e.train.steps)
    # It knows of no waiting, of which a busy machine has much: test_what_if.py has how exact it is.
    assert same.merged == pytest.approx(recorded.merged, rel=0.5)
    assert same.tokens == pytest.approx(recorded.tokens, rel=0.5)
