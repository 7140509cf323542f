"""Snapshots of runs with real threads and steps: what they hold, and what they cost nobody."""

import collections
import concurrent.futures
import threading
from unittest import mock

import jax
import pytest

from ddiloco.storage.snapshots.parts import SYNCER_PART
from ddiloco.storage.snapshots.store import PartWriter
from ddiloco.telemetry import records
from ddiloco.workers.learner_arrays import TrainingArrays
from ddiloco.workers.syncer_worker import SyncerWorker
from tests.local.stopped_runs import EVERY, LIMIT, PACE, completed, newest, part_of, run, settings
from tests.workbench import experiment


def test_a_snapshot_holds_every_learner_and_the_syncer_at_one_moment(interrupted):
    ran, workdir = interrupted
    assert len(ran.noted("snapshot")) >= 2
    assert all(values["learners"] == [0, 1] for values in ran.noted("snapshot"))
    # One may have begun when the run was stopped.
    assert all(values["reason"] == "the run is over" for values in ran.noted("snapshot_given_up"))
    snapshot = newest(workdir)
    syncer = snapshot.part(SYNCER_PART).state
    for m in (0, 1):
        part = part_of(snapshot, m)
        assert part.state["clock"] >= snapshot.header["clocks"]["syncer"]["learners"][str(m)][1]
        assert [row[0] for row in part.state["fragments"]] <= syncer["versions"]
        assert part.state["steps"] == part.state["position"]["batches"]
        assert any(name.startswith("params/") for name in part.arrays)
        assert any(name.startswith("inner/") for name in part.arrays)


def test_learners_step_on_while_their_parts_wait_to_be_written(monkeypatch, data_dir, tmp_path):
    """The writer waits for ten steps of either learner after it was asked."""
    asked, may_write = set(), threading.Event()
    since, seen = collections.Counter(), completed(1)

    class Waiting(PartWriter):
        def write(self, number, name, part):
            asked.add(name)
            self._pool.submit(may_write.wait, LIMIT)
            return super().write(number, name, part)

    def until(told):
        if isinstance(told, records.StepDone) and {"learner_000", "learner_001"} <= asked:
            since[told.learner] += 1
            if min(since[0], since[1]) >= 10:
                may_write.set()
        return seen(told)

    monkeypatch.setattr("ddiloco.workers.snapshots.taking.PartWriter", Waiting)
    ran = run(settings(data_dir), tmp_path, until=until)
    assert may_write.is_set()
    assert ran.noted("snapshot")[0]["learners"] == [0, 1]


@pytest.mark.parametrize(
    ("stopped", "when"), [(False, "_finish_snapshot"), (False, "_finish_merges"), (True, "_finish_snapshot")]
)
def test_after_the_last_step_a_snapshot_has_the_time_to_be_written_that_its_bytes_need(
    stopped, when, monkeypatch, data_dir, tmp_path
):
    """Nothing is written before the syncer has begun to end; a run that is stopped has less time then."""
    ending, over, seen, written = threading.Event(), getattr(SyncerWorker, when), set(), []

    class Waiting(PartWriter):
        def write(self, number, name, part):
            self._pool.submit(ending.wait, LIMIT)
            written.append(super().write(number, name, part))
            return written[-1]

    def finish(worker):
        ending.set()
        if when == "_finish_merges":  # which finds in the inbox what writing tells
            concurrent.futures.wait(written, LIMIT)
        over(worker)

    def until(told):  # the cut is whole
        if isinstance(told, records.Noted) and told.name == "round":
            seen.add(told.values["step"])
        return stopped and max(seen, default=0) >= EVERY + 3

    monkeypatch.setattr("ddiloco.workers.snapshots.taking.PartWriter", Waiting)
    monkeypatch.setattr("ddiloco.workers.syncer_worker._SNAPSHOT_SECONDS", 0.0)
    monkeypatch.setattr(SyncerWorker, when, finish)
    ran = run(settings(data_dir, train={"steps": 1000 if stopped else EVERY + 4}), tmp_path, until=until)
    assert [values["learners"] for values in ran.noted("snapshot")] == ([] if stopped else [[0, 1]])
    # A disk that is slow may still take what was given up.
    concurrent.futures.wait([one for one in written if not one.cancelled()], LIMIT)


@pytest.mark.slow
def test_a_learner_that_is_stuck_costs_the_snapshot_and_holds_nobody_up(data_dir, tmp_path):
    released = threading.Event()

    def stuck(learner, batches):
        for i, batch in enumerate(batches):
            if learner == 0 and i == 3:
                released.wait(LIMIT)
            yield batch

    e = experiment(
        data_dir,
        train={"steps": 40, "min_step_seconds": (PACE, PACE)},
        snapshot={"every": EVERY, "timeout": 0.3},
        tape={"enabled": False},
    )
    seen = completed(1)

    def until(told):
        if seen(told):
            released.set()
        return False

    ran = run(e, tmp_path, until=until, around=lambda m, b: Positioned(stuck(m, b), b))
    reason = ran.noted("snapshot_given_up")[0]["reason"]
    assert reason.endswith("not all parts came within snapshot.timeout (learner 0)")
    assert ran.outcome.finished


class Positioned:
    """Batches of an iterator, with the positions of another."""

    def __init__(self, batches, positions):
        self._batches, self._positions = batches, positions

    def __next__(self):
        return next(self._batches)

    def get_state(self):
        return self._positions.get_state()


def test_a_disk_that_refuses_costs_the_snapshots_with_an_alarm_and_never_the_run(data_dir, tmp_path):
    (tmp_path / "snapshots").write_text("a file where a folder must be")
    ran = run(settings(data_dir, train={"steps": 20}), tmp_path)
    assert ran.outcome.finished
    assert ran.noted("snapshot_given_up")
    [alarm] = {r.sentence for r in ran.records if isinstance(r, records.Alarm)}
    assert "a snapshot is given up; training goes on" in alarm


@pytest.mark.slow
def test_devices_without_memory_for_a_copy_cost_the_snapshot_and_never_the_run(data_dir, tmp_path):
    def no_memory(self):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    with mock.patch.object(TrainingArrays, "state", no_memory):
        ran = run(settings(data_dir, train={"steps": 20}), tmp_path)
    assert ran.outcome.finished
    assert "the state cannot be copied" in ran.noted("snapshot_given_up")[0]["reason"]
