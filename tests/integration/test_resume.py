"""A run whose processes are all killed goes on from a snapshot by its number: nothing twice, nothing lost."""

import pytest

from ddiloco.storage import array_file
from ddiloco.storage.learner_state import of_all_hosts
from ddiloco.storage.run_mark import FRAGMENT
from ddiloco.storage.snapshots import SnapshotStore
from experiments.studies.chaos.committed import check_work
from experiments.studies.replay.reading import read_run
from tests.integration.hand import LOOP
from tests.integration.programs import LIMIT
from tests.integration.remote_runs import lines, summary_of
from tests.integration.test_hosts import CODECS, HOSTS
from tests.refusals import assert_refused
from tests.remote.ends import until

TAKING = (
    "--config.eval.every=None",
    "--config.sync.quorum=None",
    "--config.snapshot.every=6",
    "--config.recovery.keep_versions=50",
)
SMALL = (LOOP, "--config.train.min_step_seconds=(0.02, 0.02)")
DRIVERS = {
    "local": (*SMALL, "--config.driver=local"),
    "transformer": ("--config.driver=remote",),
    "shards": (*SMALL, "--config.driver=remote", "--config.remote.syncer_shards=2"),
    "hosts": (*HOSTS, "--config.remote.hosts=(2, 1)", *CODECS, "--config.outer.error_feedback=true"),
}


def complete(workdir):
    """The numbers of the snapshots that are complete."""
    return sorted(int(path.parent.name) for path in workdir.glob("snapshots/*/snapshot.json"))


def killed_whole(driver, programs, tmp_path):
    """Has a run killed that has some snapshots; gives what starts it again with other settings."""
    own = [f"--workdir={tmp_path}"] if LOOP in DRIVERS[driver] else programs.training(tmp_path)
    changes = [*own, *DRIVERS[driver], *TAKING]
    devices = f"{programs.environment['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    flags = {"XLA_FLAGS": devices} if driver == "hosts" else {}

    def start(*more):
        arguments = {setting.partition("=")[0]: setting for setting in (*changes, *more)}.values()
        return programs.start_module("experiments.train", *arguments, **flags)

    process = start("--config.train.steps=100000")
    try:

        def some_are_complete():
            assert process.poll() is None, process.communicate()
            return len(complete(tmp_path)) >= 2 and complete(tmp_path)[-2] >= 3  # after the first rounds

        until(some_are_complete, "the snapshots", LIMIT)
    finally:
        process.kill()  # the rest of its processes go with it
        process.communicate()
    return start


@pytest.mark.parametrize(
    "driver",
    ["shards", *(pytest.param(name, marks=pytest.mark.slow) for name in ("transformer", "local", "hosts"))],
)
def test_a_run_that_is_killed_whole_goes_on_from_a_snapshot(driver, programs, tmp_path):
    start = killed_whole(driver, programs, tmp_path)
    number = complete(tmp_path)[-2]
    snapshot = SnapshotStore(tmp_path / "snapshots", 9).open(number)
    assert snapshot.header.learners == (0, 1)
    pinned = [
        array_file.load_header(snapshot.folder / "syncer" / f"fragment-{p:04d}", FRAGMENT) for p in range(3)
    ]
    assert all(header["version"] for header in pinned), "which no syncer that begins a run has"
    states = {m: of_all_hosts(snapshot.folder / "learners" / str(m)).header for m in (0, 1)}
    if driver == "hosts":
        assert len(list((snapshot.folder / "learners" / "0").iterdir())) == 2, "a file of each host"
    steps = max(snapshot.header.step, *(state.work.clock for state in states.values())) + 18
    resumed = programs.finish(start(f"--config.train.steps={steps}", f"--resume={number}"))
    assert resumed.returncode == 0, resumed.stderr
    assert f"going on from snapshot {number}, step {snapshot.header.step}; the rest is in" in resumed.stderr

    summary = summary_of(tmp_path)
    assert (summary["finished"], summary["failures"], summary["step"]) == (True, [], steps)
    rounds = lines(tmp_path / "rounds.jsonl")
    for p in range(3):
        assert [r["version"] for r in rounds if r["fragment"] == p] == [
            *range(1, 1 + summary["outer_steps"][str(p)])
        ]
    assert check_work(rounds).twice_tokens == 0
    for m in (0, 1):
        clocks = [step["step"] for step in lines(tmp_path / "learners" / str(m) / "steps.jsonl")]
        assert clocks == sorted(set(clocks)), "what came after the snapshot is cut off"
    went_on = [lives[0].header.resumed for lives in read_run(tmp_path).learners.values()]
    assert all(resumed is None or resumed.work == states[m].work for m, resumed in enumerate(went_on))
    assert any(went_on), "of most checkpoints some fragment is current"

    again = programs.run("replay", f"--workdir={tmp_path}")
    assert again.returncode == 0, again.stderr
    assert "the same as the run's" in again.stdout


def test_a_snapshot_that_is_not_there_is_told_with_those_that_are(programs, tmp_path):
    result = programs.train(tmp_path, "--resume=3")
    assert_refused(result, f"resume: {tmp_path}/snapshots/000003: is not there, or incomplete: there is no")


@pytest.mark.slow
def test_a_run_that_goes_on_with_fewer_learners_waits_for_none_of_the_others(programs, tmp_path):
    start = killed_whole("transformer", programs, tmp_path)
    number = complete(tmp_path)[-1]
    steps = 100 + SnapshotStore(tmp_path / "snapshots", 9).open(number).header.step
    seconds = (f"--config.sync.silence_timeout={10 * LIMIT}", f"--config.snapshot.timeout={11 * LIMIT}")
    fewer = ("--config.sync.num_learners=1", "--config.train.min_step_seconds=0.02", *seconds)
    resumed = programs.finish(start(f"--config.train.steps={steps}", f"--resume={number}", *fewer))
    assert resumed.returncode == 0, resumed.stderr
    summary = summary_of(tmp_path)
    assert (summary["finished"], summary["step"]) == (True, steps)
