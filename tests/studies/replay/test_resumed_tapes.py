"""Tapes of runs that go on from a snapshot: they begin with it, and are done again from there."""

import dataclasses
import shutil
import threading

import pytest

from ddiloco.local.run import LocalRun
from ddiloco.run import job
from ddiloco.run.recipes import assembly_of
from ddiloco.storage.snapshots.store import SnapshotStore
from ddiloco.storage.tape.entries import Adopted
from ddiloco.storage.tape.file import TapeError
from ddiloco.telemetry.files import read_json
from experiments.studies.replay import execution as replay
from experiments.studies.replay import plan as plans
from experiments.studies.replay import timeline, what_if
from experiments.studies.replay.reading import read_run
from tests.local.stopped_runs import completed, settings
from tests.workbench import devices

FEEDBACK = {"codec": "int4", "error_feedback": True}


def taped(data_dir, learners, steps):
    e = settings(data_dir, learners, outer=FEEDBACK, train={"steps": steps})
    return dataclasses.replace(e, tape=dataclasses.replace(e.tape, enabled=True))


def run_job(e, workdir, until=lambda told: False):
    """Runs the experiment as a whole job; `until(record)` stops it."""

    def runner(assembly, record, stop, snapshot):
        def heard(told):
            record(told)
            if until(told):
                stop.set()

        return LocalRun(assembly, heard, stop, workdir, snapshot).run()

    with devices(1):
        assert job.run_job(e, workdir, threading.Event(), runner=runner).failure is None


def replayed(workdir, e, where=None):
    """The run in a folder done again; `where`: as it is given to the command."""
    plan = replay.make_plan(e, read_run(workdir))
    with devices(1):
        snapshot = replay.first_snapshot(plan, where or workdir)
        return replay.Replay(assembly_of(e), plan, snapshot=snapshot).run()


def assert_done_again(workdir, e):
    done = replayed(workdir, e)
    assert done.sha256 == read_json(workdir / "summary.json")["params_sha256"]
    assert done.merges == done.compared > 0


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3])
def learners(request):
    return request.param


@pytest.fixture(scope="module")
def resumed(learners, data_dir, tmp_path_factory):
    """A run of two learners that goes on with as many or with three; its settings then, and its snapshot."""
    workdir = tmp_path_factory.mktemp("resumed") / "run"
    run_job(taped(data_dir, 2, 1000), workdir, completed(1))
    snapshot = SnapshotStore(workdir / "snapshots", 1).newest(lambda line: None)
    ahead = max(snapshot.part(f"learner_{m:03d}").state["clock"] for m in (0, 1))
    e = dataclasses.replace(taped(data_dir, learners, ahead + 16), resume=True)
    run_job(e, workdir)
    return workdir, e, snapshot


def test_a_run_that_goes_on_is_done_again_from_its_snapshot(resumed, learners):
    workdir, e, snapshot = resumed
    tapes = read_run(workdir)
    assert tapes.syncers[0].header.resumed_from == snapshot.name
    came_back = {m: lives[0].header.resumed for m, lives in tapes.learners.items()}
    assert all(came_back[m].snapshot == snapshot.name for m in (0, 1))
    for m in range(2, learners):
        assert came_back[m] is None
        [adopted] = [x.content for x in tapes.learners[m][0].entries if isinstance(x.content, Adopted)]
        assert adopted.origin.in_snapshot and adopted.origin.learner == 0
    assert_done_again(workdir, e)
    previous = workdir / "previous" / "1"  # has the whole of the tapes of the run before
    before = replay.recorded_experiment(previous)
    assert replayed(previous, before).sha256 == read_json(previous / "summary.json")["params_sha256"]


def test_without_its_snapshot_a_run_that_went_on_cannot_be_done_again_and_a_line_says_so(resumed, tmp_path):
    workdir, e, snapshot = resumed
    with pytest.raises(TapeError, match=r"resumed from snapshot \d+, without which .*: is incomplete"):
        replayed(workdir, e, where=tmp_path)
    copied = shutil.copytree(snapshot.folder, tmp_path / "snapshots" / snapshot.folder.name)
    damaged = next(p for p in (copied / "syncer").rglob("*") if p.is_file())
    damaged.write_bytes(damaged.read_bytes() + b" ")
    with pytest.raises(TapeError, match="cannot be used"):
        replayed(workdir, e, where=tmp_path)


def test_a_run_that_was_set_aside_finds_its_snapshot_where_the_newer_one_has_it(resumed, tmp_path):
    workdir, e, snapshot = resumed
    aside = tmp_path / "run" / "previous" / "2"
    shutil.copytree(workdir / "tape", aside / "tape")
    shutil.copytree(snapshot.folder, tmp_path / "run" / "snapshots" / snapshot.folder.name)
    assert replayed(aside, e).sha256 == read_json(workdir / "summary.json")["params_sha256"]


def test_tapes_of_a_run_that_went_on_can_be_looked_at_and_asked_what_if(resumed):
    workdir, e, snapshot = resumed
    plan = replay.make_plan(e, read_run(workdir))
    lines = timeline.timeline(plan)
    of_syncer = [line.clock for line in lines if line.learner is None and line.clock is not None]
    assert len(of_syncer) > 50
    first = snapshot.header["versions"]
    assert all(clock.versions.get(p, 0) >= v for clock in of_syncer for p, v in enumerate(first))
    recorded = what_if.recorded(plan)
    same = what_if.what_if(plan, e.sync, e.train.steps)
    assert same.merged == pytest.approx(recorded.merged, rel=0.15)
    assert same.tokens == pytest.approx(recorded.tokens, rel=0.3)  # it knows of no waiting


def test_a_first_tape_that_began_later_than_the_snapshot_is_told(resumed):
    workdir, e, _ = resumed
    tapes = read_run(workdir)
    [tape] = tapes.syncers
    first, *others = tape.header.state.versions
    state = dataclasses.replace(tape.header.state, versions=(first + 1, *others))
    later = dataclasses.replace(tape, header=dataclasses.replace(tape.header, state=state), entries=[])
    plan = plans.make_plan(dataclasses.replace(tapes, syncers=[later]), e.sync, e.train.steps)
    with devices(1), pytest.raises(TapeError, match="the tape before it is missing"):
        replay.Replay(assembly_of(e), plan, snapshot=replay.first_snapshot(plan, workdir)).run()
