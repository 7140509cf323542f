"""Tapes of runs that go on from a snapshot: whole again in virtual time, else to be done again from there."""

import dataclasses
import json
import shutil
import threading

import pytest

from ddiloco.disk.snapshots.store import SnapshotStore
from ddiloco.disk.tape.entries import Adopted, Pulled
from ddiloco.disk.tape.file import TapeError
from ddiloco.disk.tape.reading import read_run
from ddiloco.local.run import LocalRun
from ddiloco.observe import records
from ddiloco.outer.global_model import parameters_sha256
from ddiloco.replay import plan as plans
from ddiloco.replay import run as replay
from ddiloco.replay import timeline, what_if
from ddiloco.run.recipes import assembly_of
from tests.local.test_snapshots import completed, settings
from tests.virtual.test_run import TROUBLE
from tests.virtual_runs import shared_workshop, virtual

FEEDBACK = {"codec": "int4", "error_feedback": True}
EVERYTHING = {**TROUBLE, "sync": {**TROUBLE["sync"], "mixing": 0.3}, "outer": FEEDBACK}
CALM = {"train": {"steps": 24}, "snapshot": {"every": 3, "keep": 99}, "outer": FEEDBACK}
THREE = {"num_learners": 3, "quorum": 3}


@pytest.fixture(scope="module")
def workshop():
    return shared_workshop()


def resuming(e):
    return dataclasses.replace(e, resume=True)


def without_newer(workdir, number):
    """Leaves the run no snapshot after this one."""
    for path in (workdir / "snapshots").iterdir():
        if path.name.isdigit() and int(path.name) > number:
            shutil.rmtree(path)


def entries(workdir):
    """By file, what its tape tells after its header."""
    tapes = read_run(workdir)
    assert not tapes.warnings
    everyone = [*tapes.syncers, *(tape for lives in tapes.learners.values() for tape in lives)]
    return {tape.path.name: tape.entries for tape in everyone}


def replayed(workshop, workdir, e, where=None):
    """The run in a folder done again; `where`: as it is given to the command."""
    plan = replay.make_plan(e, read_run(workdir))
    with workshop.open():
        return replay.replay(
            workshop.assembly(e), plan, snapshot=replay.first_snapshot(plan, where or workdir)
        )


def assert_done_again(workshop, workdir, e):
    done = replayed(workshop, workdir, e)
    assert done.sha256 == replay.recorded_sha256(workdir)
    assert done.merges == done.compared > 0


# As if it had never ended.


@pytest.fixture(scope="module")
def troubled(workshop, data_dir, tmp_path_factory):
    """A run with everything that can befall one, its settings, and a snapshot every second step."""
    workdir = tmp_path_factory.mktemp("troubled") / "run"
    e = virtual(data_dir, **EVERYTHING, snapshot={"every": 2, "keep": 99})
    workshop.job(e, workdir)
    return workdir, e


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_the_tape_of_a_run_that_goes_on_exactly_is_that_of_one_that_never_ended(
    which, workshop, troubled, tmp_path
):
    workdir, e = troubled
    shutil.copytree(workdir, tmp_path / "run")
    numbers = sorted(int(path.name) for path in (workdir / "snapshots").iterdir() if path.name.isdigit())
    without_newer(tmp_path / "run", numbers[which])
    result = workshop.job(resuming(e), tmp_path / "run")
    assert entries(tmp_path / "run") == entries(workdir)
    assert any(isinstance(x.thing, Pulled) for told in entries(workdir).values() for x in told)
    if which == 1:
        assert_done_again(workshop, tmp_path / "run", resuming(e))
        assert result.summary["params_sha256"] == replay.recorded_sha256(workdir)


def test_a_tape_that_is_not_whole_up_to_the_snapshot_ends_the_tapes_and_not_the_run(
    workshop, troubled, tmp_path, capsys
):
    workdir, e = troubled
    shutil.copytree(workdir, tmp_path / "run")
    without_newer(tmp_path / "run", 2)
    (tmp_path / "run" / "tape" / "syncer-1.tape").write_bytes(b"")
    result = workshop.job(resuming(e), tmp_path / "run")
    assert result.summary["params_sha256"] == replay.recorded_sha256(workdir)
    assert "up to the snapshot the run has no whole tape" in json.dumps(result.summary["alarms"])
    with pytest.raises(TapeError, match="holds no tape of a syncer"):
        read_run(tmp_path / "run")


# With other settings.


@pytest.fixture(scope="module")
def returned(workshop, data_dir, tmp_path_factory):
    """A run of two learners that goes on with three and at other speeds, as a job; and its settings."""
    workdir = tmp_path_factory.mktemp("returned") / "run"
    workshop.job(virtual(data_dir, **CALM, sync={"quorum": 2}), workdir)
    without_newer(workdir, 3)
    pace = {"step_seconds": (1.0, 1.5, 1.2), "latency": (0.1,)}
    e = resuming(virtual(data_dir, **CALM, sync=THREE, virtual=pace))
    workshop.job(e, workdir)
    return workdir, e


def test_a_run_that_goes_on_with_other_settings_is_done_again_from_its_snapshot(workshop, returned):
    workdir, e = returned
    tapes = read_run(workdir)
    assert tapes.syncers[0].header.resumed_from.number == 3
    assert [lives[0].header.returned is not None for lives in tapes.learners.values()] == [True, True, False]
    [adopted] = [x.thing for x in tapes.learners[2][0].entries if isinstance(x.thing, Adopted)]
    assert adopted.origin.in_snapshot and adopted.origin.learner == 0
    assert_done_again(workshop, workdir, e)
    previous = workdir / "previous" / "1"  # has the whole of the tapes of the run before
    before = replay.recorded_experiment(previous)
    assert replayed(workshop, previous, before).sha256 == replay.recorded_sha256(previous)


def test_a_run_that_goes_on_exactly_from_one_with_other_settings_is_done_again_too(
    workshop, returned, tmp_path
):
    workdir, e = returned
    shutil.copytree(workdir, tmp_path / "run")
    without_newer(tmp_path / "run", 5)
    workshop.job(e, tmp_path / "run")
    assert entries(tmp_path / "run") == entries(workdir)
    assert_done_again(workshop, tmp_path / "run", e)


def test_the_snapshot_with_which_tapes_begin_stays(workshop, returned, data_dir, tmp_path):
    workdir, e = returned
    assert (workdir / "snapshots" / "000003" / "manifest.json").exists()
    shutil.copytree(workdir, tmp_path / "run")
    again = dataclasses.replace(e, snapshot=dataclasses.replace(e.snapshot, keep=1))
    without_newer(tmp_path / "run", 3)
    workshop.job(again, tmp_path / "run")
    kept = sorted(p.name for p in (tmp_path / "run" / "snapshots").iterdir() if p.name.isdigit())
    assert kept[0] == "000003"
    assert len(kept) == 2
    assert_done_again(workshop, tmp_path / "run", again)


def test_without_its_snapshot_a_run_that_went_on_cannot_be_done_again_and_a_line_says_so(
    workshop, returned, tmp_path
):
    workdir, e = returned
    with pytest.raises(TapeError, match=r"goes on from snapshot 3, without which .*: is incomplete"):
        replayed(workshop, workdir, e, where=tmp_path)
    shutil.copytree(workdir / "snapshots" / "000003", tmp_path / "snapshots" / "000003")
    damaged = next(p for p in (tmp_path / "snapshots" / "000003" / "syncer").rglob("*") if p.is_file())
    damaged.write_bytes(damaged.read_bytes() + b" ")
    with pytest.raises(TapeError, match="cannot be used"):
        replayed(workshop, workdir, e, where=tmp_path)


def test_a_run_that_was_set_aside_finds_its_snapshot_where_the_newer_one_has_it(workshop, returned, tmp_path):
    workdir, e = returned
    aside = tmp_path / "run" / "previous" / "2"
    shutil.copytree(workdir / "tape", aside / "tape")
    shutil.copytree(workdir / "snapshots" / "000003", tmp_path / "run" / "snapshots" / "000003")
    assert replayed(workshop, aside, e).sha256 == replay.recorded_sha256(workdir)


def test_tapes_of_a_run_that_went_on_can_be_looked_at_and_asked_what_if(returned):
    workdir, e = returned
    plan = replay.make_plan(e, read_run(workdir))
    lines = timeline.timeline(plan)
    of_syncer = [line.clock for line in lines if line.learner is None and line.clock is not None]
    first = SnapshotStore(workdir / "snapshots", 9).open(3).header["versions"]
    assert len(of_syncer) > 50
    assert all(clock.versions.get(p, 0) >= v for clock in of_syncer for p, v in enumerate(first))
    recorded = what_if.recorded(plan)
    same = what_if.what_if(plan, e.sync, e.train.steps)
    assert same.merged == recorded.merged
    assert same.tokens == pytest.approx(recorded.tokens, rel=0.1)
    assert what_if.what_if(plan, dataclasses.replace(e.sync, quorum=1), e.train.steps).merged >= same.merged


def test_a_first_tape_that_began_later_than_the_snapshot_is_told(workshop, returned):
    workdir, e = returned
    tapes = read_run(workdir)
    [tape] = tapes.syncers
    state = dataclasses.replace(tape.header.state, versions=(9, *tape.header.state.versions[1:]))
    later = dataclasses.replace(tape, header=dataclasses.replace(tape.header, state=state), entries=[])
    plan = plans.make_plan(dataclasses.replace(tapes, syncers=[later]), e.sync, e.train.steps)
    with workshop.open(), pytest.raises(TapeError, match="the tape before it is missing"):
        replay.replay(workshop.assembly(e), plan, snapshot=replay.first_snapshot(plan, workdir))


# In wall-clock time.


@pytest.mark.parametrize("learners", [2, 3])
def test_a_run_of_threads_that_goes_on_is_done_again_from_its_snapshot(
    learners, data_dir, tmp_path, one_device
):
    def taped(count, steps):
        e = settings(data_dir, count, outer=FEEDBACK, train={"steps": steps})
        return dataclasses.replace(e, tape=dataclasses.replace(e.tape, enabled=True))

    def run(e, snapshot=None, until=None):
        stop, told = threading.Event(), []

        def record(r):
            told.append(r)
            if until is not None and until(r):
                stop.set()

        outcome = LocalRun(assembly_of(e), record, stop, tmp_path, snapshot).run()
        assert outcome.failure is None
        return outcome, told

    run(taped(2, 1000), until=completed(1))
    shutil.rmtree(tmp_path / "tape")
    snapshot = SnapshotStore(tmp_path / "snapshots", 1).newest(lambda line: None)
    ahead = max(snapshot.part(f"learner_{m:03d}").state["clock"] for m in (0, 1))
    e = taped(learners, ahead + 16)
    outcome, told = run(e, snapshot)
    assert [r.versions for r in told if isinstance(r, records.Resumed)] == [
        tuple(snapshot.header["versions"])
    ]
    plan = replay.make_plan(e, read_run(tmp_path))
    assert all(plan.learners[m].tapes[0].header.returned.snapshot == snapshot.name for m in (0, 1))
    done = replay.replay(assembly_of(e), plan, snapshot=replay.first_snapshot(plan, tmp_path))
    assert done.sha256 == parameters_sha256(outcome.params)
    assert done.merges == done.compared > 0
