"""Virtual runs that train go on from any snapshot as if they had never ended, or with other settings."""

import concurrent.futures
import dataclasses
import json
import random
import shutil
import threading
from unittest import mock

import numpy as np
import pytest

from ddiloco.config import ConfigError
from ddiloco.disk.snapshots.store import PartWriter, SnapshotError, SnapshotStore
from ddiloco.observe import records
from ddiloco.virtual.run import run_virtual
from ddiloco.virtual.snapshots import VirtualSnapshots
from ddiloco.virtual.without_arrays import run_without_arrays
from tests.virtual.test_run import TROUBLE, lines
from tests.virtual_runs import VirtualRun, shared_workshop, virtual

EVERYTHING = {
    **TROUBLE,
    "sync": {**TROUBLE["sync"], "mixing": 0.3},
    "outer": {"codec": "int4", "error_feedback": True},
    "eval": {"every": 3},
}
KEEP_ALL = {"every": 1, "keep": 1000}
EVENTS = 120  # of the run with everything; it has a few more


@pytest.fixture(scope="module")
def workshop():
    return shared_workshop()


@pytest.fixture(scope="module")
def run(workshop, data_dir):
    """Runs an experiment, from its start or `since` a snapshot; its snapshots go to `folder`."""

    def once(folder=None, since=None, **groups):
        taken, e = [], virtual(data_dir, **groups)
        with workshop.open():
            outcome = run_virtual(workshop.assembly(e), taken.append, threading.Event(), folder, since)
        return VirtualRun(outcome, taken, e)

    return once


@pytest.fixture(scope="module")
def whole(run):
    """The uninterrupted run with everything that can befall one."""
    return run(**EVERYTHING)


def at_events(events):
    """Has snapshots begun after these many events, or as soon after as none is under way."""
    due = sorted(events)

    def wanted(self):
        if not due or self._fleet.calendar.happened < due[0]:
            return None
        while due and self._fleet.calendar.happened >= due[0]:
            due.pop(0)
        self._number += 1
        return self._number

    return mock.patch.object(VirtualSnapshots, "_wanted", wanted)


def snapshots_in(folder):
    """Every snapshot under a workdir, by number."""
    store = SnapshotStore(folder / "snapshots", 1000)
    return [store.open(int(path.name)) for path in sorted((folder / "snapshots").iterdir())]


def shown(taken):
    """Records of the run itself, in a form that can be compared."""
    kept = []
    for r in taken:
        if isinstance(r, records.StepDone):
            metrics = {name: np.asarray(value).tolist() for name, value in r.metrics.items()}
            kept.append((r.learner, r.step, r.time, r.tokens, metrics))
        elif not (isinstance(r, records.Noted) and r.name.startswith("snapshot")):
            kept.append(r)
    return kept


def assert_the_rest_of(whole, resumed, snapshot):
    """That the resumed run is what the whole one is after the snapshot, to the bit."""
    assert resumed.sha256 == whole.sha256
    assert resumed.outcome.eval_loss == whole.outcome.eval_loss
    rest, expected = shown(resumed.records), shown(whole.records)
    assert rest == expected[len(expected) - len(rest) :]
    before = VirtualRun(whole.outcome, whole.records[: len(whole.records) - len(rest)], whole.experiment)
    told = snapshot.header["records"]
    assert told["steps"] == {str(m): len(before.steps(m)) for m in (0, 1) if before.steps(m)}
    assert told["rounds"] == len(before.noted("round"))
    assert told["states"] == len(before.of(records.StateChanged))


# As if it had never ended.


@pytest.fixture(scope="module")
def ten(run, tmp_path_factory):
    """The same run a few times, with ten snapshots at random points in all, and these."""
    rng, runs, taken = random.Random(10), [], []
    while len(taken) < 10:
        folder = tmp_path_factory.mktemp("ten")
        with at_events(rng.randrange(5, EVENTS) for _ in range(8)):
            runs.append(run(folder, **EVERYTHING, snapshot=KEEP_ALL))
        taken += snapshots_in(folder)
    return runs, taken


def test_taking_snapshots_changes_neither_parameters_nor_records(ten, whole):
    for snapped in ten[0]:
        assert snapped.sha256 == whole.sha256
        assert shown(snapped.records) == shown(whole.records)


def test_from_random_points_a_run_ends_with_the_parameters_of_the_uninterrupted_one(ten, run, whole):
    for snapshot in ten[1]:
        resumed = run(since=snapshot, **EVERYTHING, snapshot=KEEP_ALL)
        assert_the_rest_of(whole, resumed, snapshot)


def test_the_random_points_have_fragments_on_the_wire_and_on_shelves_and_learners_that_are_dead(ten):
    _, taken = ten
    parts = [s.part(name) for s in taken for name in s.parts]
    kinds = {name.split("/")[0] for part in parts for name in part.arrays}
    assert kinds == {"params", "inner", "anchor", "residual", "left", "fragment", "outer", "payload"}
    assert any(s.header["absent"] for s in taken)
    assert any(s.header["in_flight"] for s in taken)


def test_a_run_that_goes_on_takes_snapshots_from_which_another_goes_on(ten, run, whole, tmp_path):
    first = min(ten[1], key=lambda s: abs(s.header["step"] - 2))
    done = first.part("syncer").state["exact"]["values"]["calendar"][1]
    with at_events([done + 1, EVENTS - 20]):  # the first while learners are yet to come to their own cut
        second = run(tmp_path, first, **EVERYTHING, snapshot=KEEP_ALL, tape={"enabled": False})
    assert_the_rest_of(whole, second, first)
    taken = snapshots_in(tmp_path)
    assert [s.number for s in taken] == [first.number + 1, first.number + 2]
    for snapshot in taken:
        assert_the_rest_of(whole, run(since=snapshot, **EVERYTHING, snapshot=KEEP_ALL), snapshot)


def test_a_snapshot_is_taken_each_time_that_so_many_steps_are_merged(run, tmp_path):
    done = run(tmp_path, snapshot={"every": 4, "keep": 2})
    assert [v["step"] for v in done.noted("snapshot")] == [4, 8, 12][: len(done.noted("snapshot"))]
    assert len(done.noted("snapshot")) >= 2
    assert [s.header["step"] for s in snapshots_in(tmp_path)] == [v["step"] for v in done.noted("snapshot")][
        -2:
    ]
    assert run(tmp_path / "none").sha256 == done.sha256
    assert not (tmp_path / "none" / "snapshots").exists()


def test_a_disk_that_refuses_is_told_of_and_the_run_goes_on(run, tmp_path):
    def refuses(writer, number, name, part):
        future = concurrent.futures.Future()
        future.set_exception(SnapshotError("no space left"))
        return future

    with mock.patch.object(PartWriter, "write", refuses):
        done = run(tmp_path, snapshot={"every": 4})
    assert len(done.noted("snapshot_given_up")) >= 2
    assert {v["reason"] for v in done.noted("snapshot_given_up")} == {"no space left"}
    assert {a.sentence for a in done.of(records.Alarm)} == {
        "no space left: a snapshot is given up; training goes on"
    }
    assert done.sha256 == run().sha256


def test_a_snapshot_that_is_under_way_when_the_run_ends_is_given_up_and_told_of(run, tmp_path):
    with at_events([129]):  # the last of its events but one
        done = run(tmp_path, **CALM, snapshot=KEEP_ALL)
    [given_up] = done.noted("snapshot_given_up")
    assert given_up["number"] == 1
    assert given_up["reason"] == "the run ended before every learner had recorded its state"
    assert not done.noted("snapshot")


@pytest.mark.slow
def test_from_300_random_points_runs_end_with_the_parameters_of_the_uninterrupted_ones(run, tmp_path):
    count = seed = 0
    while count < 300:
        groups = {**EVERYTHING, "seed": seed}
        whole, rng, folder = run(**groups), random.Random(seed), tmp_path / str(seed)
        with at_events(rng.randrange(5, EVENTS) for _ in range(60)):
            run(folder, **groups, snapshot=KEEP_ALL)
        for snapshot in snapshots_in(folder):
            resumed = run(since=snapshot, **groups, snapshot=KEEP_ALL)
            assert_the_rest_of(whole, resumed, snapshot)
            count += 1
        seed += 1
    print(f"{count} snapshots of {seed} runs: each run that went on ended with the same parameters")


# With other settings.

CALM = {"virtual": {"step_seconds": (1.0,), "latency": (0.25,), "merge_seconds": 0.25}}


@pytest.fixture(scope="module")
def calm(run, tmp_path_factory):
    """A run in which nobody fails, and a snapshot from its middle."""
    folder = tmp_path_factory.mktemp("calm")
    done = run(folder, **CALM, snapshot={"every": 6, "keep": 1000})
    return done, snapshots_in(folder)[0]


def told_at(snapshot, learner):
    """Tokens of a learner's steps that had been recorded at the cut."""
    return snapshot.header["records"]["steps"][str(learner)]


def trained_in(snapshot, learner):
    """Tokens of all steps in a learner's state."""
    return snapshot.part(f"learner_{learner:03d}").state["tokens"]


@pytest.mark.parametrize(
    "changes",
    [{"outer": EVERYTHING["outer"]}, {"virtual": {**CALM["virtual"], "step_seconds": (1.0, 1.5)}}],
    ids=["codec", "speeds"],
)
def test_with_other_settings_everybody_goes_on_with_what_it_held_and_no_step_is_lost(changes, run, calm):
    done, snapshot = calm
    resumed = run(since=snapshot, **{**CALM, **changes})
    assert resumed.outcome.finished
    assert resumed.outcome.eval_loss < done.of(records.Evaluated)[0].loss
    for m in (0, 1):
        before = done.steps(m)[: told_at(snapshot, m)]
        told = [step.tokens for step in resumed.steps(m) if step.metrics == {}]  # in the state at the cut
        assert sum(step.tokens for step in before) + sum(told) == trained_in(snapshot, m)
        clocks = [step.step for step in (*before, *resumed.steps(m))]
        assert clocks == sorted(set(clocks))
    merged = {}
    for v in resumed.noted("round"):
        merged.setdefault(v["fragment"], []).append(v["version"])
    for p, versions in merged.items():
        first = snapshot.header["versions"][p] + 1
        assert versions == list(range(first, first + len(versions)))


def test_of_more_learners_the_new_ones_join_and_all_are_merged(run, calm):
    _, snapshot = calm
    resumed = run(since=snapshot, **CALM, sync={"num_learners": 3, "quorum": 3})
    assert resumed.outcome.finished
    ready = [v["learner"] for v in resumed.noted("learner_ready")]
    assert sorted(ready) == [0, 1, 2]
    assert {tuple(v["learners"]) for v in resumed.noted("round")} == {(0, 1, 2)}


def test_a_run_with_other_settings_takes_snapshots_from_which_it_goes_on_exactly(run, calm, tmp_path):
    _, snapshot = calm
    groups = {**CALM, "sync": {"num_learners": 3, "quorum": 3}, "snapshot": {"every": 3, "keep": 9}}
    resumed = run(tmp_path, snapshot, **groups)
    taken = snapshots_in(tmp_path)
    assert taken[0].number > snapshot.number
    for later in taken:
        assert run(since=later, **groups).sha256 == resumed.sha256


# Without arrays.


def timed(data_dir, taken, folder=None, since=None, **groups):
    e = virtual(data_dir, **{**TROUBLE, **groups, "virtual": {**TROUBLE["virtual"], "arrays": False}})
    return run_without_arrays(e, [400] * 3, taken.append, threading.Event(), None, folder, since)


def test_a_run_without_arrays_goes_on_exactly(data_dir, tmp_path):
    plain, snapped = [], []
    timed(data_dir, plain, train={"steps": 40})
    outcome = timed(data_dir, snapped, tmp_path, train={"steps": 40}, snapshot={"every": 5, "keep": 99})
    assert shown(snapped) == shown(plain)
    assert len(snapshots_in(tmp_path)) >= 4
    for snapshot in snapshots_in(tmp_path):
        resumed = []
        assert timed(data_dir, resumed, None, snapshot, train={"steps": 40}) == outcome
        assert shown(resumed) == shown(plain)[-len(resumed) :]


def test_a_run_without_arrays_goes_on_only_with_its_own_settings(data_dir, run, tmp_path):
    timed(data_dir, [], tmp_path, snapshot={"every": 4})
    snapshot = snapshots_in(tmp_path)[-1]
    with pytest.raises(ConfigError, match=r"config\.sync\.gamma: was 0\.8, is 0\.5: a run without arrays"):
        timed(data_dir, [], None, snapshot, sync={**TROUBLE["sync"], "gamma": 0.5})
    with pytest.raises(ConfigError, match=r"config\.virtual\.arrays: was false, is true"):
        run(since=snapshot, **TROUBLE)


# As a job, with its files.


def resuming(experiment):
    return dataclasses.replace(experiment, resume=True)


def test_a_job_that_goes_on_from_the_newest_sound_snapshot_leaves_the_files_of_one_that_never_ended(
    workshop, data_dir, tmp_path, capsys
):
    groups = {**EVERYTHING, "snapshot": {"every": 2, "keep": 99}}
    expected = workshop.job(virtual(data_dir, **EVERYTHING), tmp_path / "whole")
    workshop.job(virtual(data_dir, **groups), tmp_path / "run")
    _, sound, newest, *later = sorted((tmp_path / "run" / "snapshots").iterdir())
    for path in later:
        shutil.rmtree(path)
    damaged = next(path for path in newest.rglob("*") if path.is_file() and path.name != "manifest.json")
    damaged.write_bytes(bytes([damaged.read_bytes()[0] ^ 1]) + damaged.read_bytes()[1:])
    capsys.readouterr()
    result = workshop.job(resuming(virtual(data_dir, **groups)), tmp_path / "run")
    told = capsys.readouterr().err
    assert f"{newest}: cannot be used" in told
    assert f"going on from snapshot {int(sound.name)}" in told
    own = {"real_seconds", "train_loss", "snapshots", "snapshots_given_up"}
    first, second = ({k: v for k, v in r.summary.items() if k not in own} for r in (expected, result))
    assert second == first
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == result.summary
    for name in ("learners/0/steps.jsonl", "learners/1/steps.jsonl", "rounds.jsonl", "states.jsonl"):
        assert lines(tmp_path / "run" / name) == lines(tmp_path / "whole" / name)
