"""Snapshots of runs with real threads and steps: what they hold, what they cost, and going on from one."""

import collections
import json
import shutil
import threading
from unittest import mock

import numpy as np
import pytest

from ddiloco.config import ConfigError
from ddiloco.run import rollback
from ddiloco.run.recipes import assembly_of
from ddiloco.run.rollback import going_on
from ddiloco.storage import run_mark
from ddiloco.storage.durable import DurableState
from ddiloco.storage.learner_state import LearnerStates
from ddiloco.telemetry import records
from experiments.studies.chaos.committed import check_work
from tests.local.stopped_runs import LIMIT, completed, newest, run, settings, state_of
from tests.workbench import assert_equal


def alarms(ran):
    return [r.sentence for r in ran.records if isinstance(r, records.Alarm)]


def versions_in(folder, e):
    """By fragment, the version and the marks in a syncer's folder."""
    layout = assembly_of(e).layout
    return DurableState(folder, layout, print, threading.Event(), run_mark.begun(folder).run).state()


def test_a_snapshot_has_a_checkpoint_of_each_learner_and_versions_as_new_or_newer(interrupted, data_dir):
    ran, workdir = interrupted
    assert len(ran.noted("snapshot")) >= 2
    assert all(values["learners"] == [0, 1] for values in ran.noted("snapshot"))
    # One may have begun when the run was stopped.
    assert all(values["reason"] == "the run is over" for values in ran.noted("snapshot_given_up"))
    snapshot = newest(workdir)
    snapshot.check()
    pinned = versions_in(snapshot.folder / "syncer", settings(data_dir))
    assert snapshot.header.step == pinned.step
    for m in (0, 1):
        header = state_of(snapshot, m).header
        held = [fragment.version for fragment in header.work.fragments]
        assert all(a <= b for a, b in zip(held, pinned.versions, strict=True))
        assert header.steps == header.position["batches"]
        assert header.run == snapshot.header.run


@pytest.fixture(scope="module")
def resumed(interrupted, data_dir, tmp_path_factory):
    """What follows from the newest snapshot of the interrupted run, and the batches that are drawn."""
    folder = shutil.copytree(interrupted[1], tmp_path_factory.mktemp("resumed") / "run")
    snapshot, drawn, told = newest(folder), {0: [], 1: []}, []
    e = settings(data_dir, train={"steps": snapshot.header.step + 32}, snapshot={"keep": 99})
    rounds = [r for r in interrupted[0].records if isinstance(r, records.Noted) and r.name == "round"]
    assert going_on(int(snapshot.folder.name), folder, e, told.append)
    assert told[0].startswith(f"going on from snapshot {int(snapshot.folder.name)}, step ")
    states = [LearnerStates(folder / "learners" / str(m)).newest(snapshot.header.run) for m in (0, 1)]
    ran = run(e, folder, around=lambda m, b: Watched(b, drawn[m]))
    return ran, snapshot, drawn, folder, states, rounds


class Watched:
    """Batches, with all that were drawn."""

    def __init__(self, batches, drawn):
        self._batches, self._drawn = batches, drawn

    def __next__(self):
        self._drawn.append(next(self._batches))
        return self._drawn[-1]

    def __getattr__(self, name):
        return getattr(self._batches, name)


def test_a_run_that_goes_on_merges_no_work_of_the_snapshot_twice(resumed, data_dir):
    ran, snapshot, _, folder, _, rounds = resumed
    assert (ran.outcome.finished, ran.outcome.failure) == (True, None)
    pinned = versions_in(snapshot.folder / "syncer", settings(data_dir)).versions
    made = ran.noted("round")
    firsts = {p: min(r["version"] for r in made if r["fragment"] == p) for p in range(3)}
    assert firsts == {p: version + 1 for p, version in enumerate(pinned)}
    stayed = [r.values for r in rounds if r.values["version"] <= pinned[r.values["fragment"]]]
    assert check_work(stayed + made).twice_tokens == 0
    later = list((folder / "previous").glob("*/syncer/fragment-*"))
    assert later, "what came later is kept"


def test_its_learners_are_those_of_the_snapshot_and_draw_what_follows_on_all_that_is_merged(
    resumed, data_dir
):
    _, snapshot, drawn, _, states, _ = resumed
    pinned = versions_in(snapshot.folder / "syncer", settings(data_dir))
    for m in (0, 1):
        then = state_of(snapshot, m)
        assert states[m].header == then.header
        for name, array in then.arrays.items():
            np.testing.assert_array_equal(states[m].arrays[name], array)
        fresh = assembly_of(settings(data_dir)).batches((m,))
        merged = json.loads(pinned.furthest(m).position)["batches"]
        for _ in range(max(then.header.position["batches"], merged)):
            next(fresh)
        assert drawn[m]
        for batch in drawn[m]:
            assert_equal(batch, next(fresh))


def test_it_leaves_snapshots_with_higher_numbers(resumed):
    _, first, _, folder, *_ = resumed
    second = newest(folder)
    assert int(second.folder.name) > int(first.folder.name)
    assert second.header.step > first.header.step and second.header.run == first.header.run
    for m in (0, 1):
        before, after = (state_of(snapshot, m).header for snapshot in (first, second))
        # Where all of its versions were too old by then, only the inner state of the checkpoint is used.
        assert after.trained > before.trained and after.work.life != 0


@pytest.mark.parametrize(
    ("learners", "mesh"),
    [pytest.param(*one, marks=pytest.mark.slow) for one in ((3, {}), (1, {"data": 1, "fsdp": 2}))],
)
def test_another_number_of_learners_with_another_codec_and_mesh_goes_on(learners, mesh, folder, data_dir):
    """Nor does it wait for those that the run has no longer."""
    snapshot = newest(folder)
    e = settings(
        data_dir,
        learners,
        sync={"silence_timeout": 10 * LIMIT},
        train={"steps": snapshot.header.step + 24},
        outer={"codec": "int4", "error_feedback": True},
        mesh=mesh,
    )
    assert going_on(int(snapshot.folder.name), folder, e, print)
    ran = run(e, folder, count=2 if mesh else 1)
    assert (ran.outcome.finished, ran.outcome.failure) == (True, None)
    assert {m for _, m, *_ in ran.contributions} == set(range(learners))
    assert np.isfinite(ran.outcome.eval_loss)


def test_a_damaged_snapshot_is_refused_by_name_and_changes_nothing(folder, data_dir):
    snapshot = newest(folder)
    damaged = next((snapshot.folder / "learners" / "1").iterdir())
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + b"?")
    before = [*folder.rglob("*")]
    e = settings(data_dir)
    with pytest.raises(ConfigError, match=rf"resume: {snapshot.folder}: cannot be used: learners/1/state\.0"):
        going_on(int(snapshot.folder.name), folder, e, print)
    with pytest.raises(ConfigError, match=r"resume: .*/000077: is not there, or incomplete: complete are "):
        going_on(77, folder, e, print)
    damaged.write_bytes(whole)
    with pytest.raises(ConfigError, match=r"config\.train\.steps: is 1, but must be at least"):
        going_on(int(snapshot.folder.name), folder, settings(data_dir, train={"steps": 1}), print)
    locks = {folder / ".lock", *(folder / "syncer" / f"owner-{p:04d}" for p in range(3))}
    assert {*folder.rglob("*")} - locks == {*before} - locks


@pytest.mark.parametrize("fatal", ["_prepare", "trim", "_exchange_checkpoints", "_keep_with_tapes"])
def test_interrupted_on_the_way_back_it_is_done_by_the_next_call(fatal, folder, data_dir, monkeypatch):
    snapshot, e, whole = newest(folder), settings(data_dir), getattr(rollback, fatal)

    def interrupted(*arguments):
        whole(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(rollback, fatal, interrupted)
    with pytest.raises(KeyboardInterrupt):
        going_on(int(snapshot.folder.name), folder, e, print)
    monkeypatch.undo()
    assert going_on(int(snapshot.folder.name), folder, e, print)
    for path in [*snapshot.folder.glob("syncer/fragment-*"), *snapshot.folder.glob("learners/*/state.*")]:
        assert (folder / path.relative_to(snapshot.folder)).read_bytes() == path.read_bytes()
    assert len(list(folder.glob("learners/*/state.*"))) == 2
    assert run_mark.begun(folder / "syncer").run == snapshot.header.run


def test_learners_step_on_while_their_checkpoints_are_written(data_dir, tmp_path):
    """The disk takes none before either learner has done ten more steps."""
    asked, may_write, since = set(), threading.Event(), collections.Counter()
    save, seen = LearnerStates.save, completed(1)

    def waits(self, number, arrays, about=None):
        if "snapshots" in self.folder.parts:
            asked.add(int(self.folder.name))
            may_write.wait(LIMIT)
        save(self, number, arrays, about)

    def until(told):
        if isinstance(told, records.StepDone) and asked == {0, 1}:
            since[told.learner] += 1
            if min(since[0], since[1]) >= 10:
                may_write.set()
        return seen(told)

    with mock.patch.object(LearnerStates, "save", waits):
        ran = run(settings(data_dir), tmp_path, until=until)
    assert may_write.is_set()
    assert ran.noted("snapshot")[0]["learners"] == [0, 1]


def test_a_disk_that_refuses_costs_the_snapshots_with_an_alarm_and_never_the_run(data_dir, tmp_path):
    (tmp_path / "snapshots").write_text("a file where a folder must be")
    ran = run(settings(data_dir, train={"steps": 20}), tmp_path)
    assert ran.outcome.finished
    assert ran.noted("snapshot_given_up")
    assert set(alarms(ran)) == {
        f"{tmp_path}/snapshots: Not a directory: a snapshot is given up; training continues"
    }
