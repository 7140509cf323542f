"""A run whose processes are all killed goes on from its newest snapshot: nothing twice, nothing lost."""

import json

import pytest

from ddiloco.storage.snapshots.parts import learner_part
from ddiloco.storage.snapshots.store import SnapshotStore
from tests.integration.programs import LIMIT
from tests.integration.remote_runs import STEADY, lines, summary_of
from tests.integration.test_hosts import CODECS, HOSTS
from tests.remote.ends import until

TAKING = (*STEADY, "--config.snapshot.every=6")


def manifests(workdir):
    """By number: the manifests of the complete snapshots."""
    found = (workdir / "snapshots").glob("[0-9]*/manifest.json")
    return {int(path.parent.name): json.loads(path.read_text()) for path in found}


def part_state(workdir, number, learner):
    """What a learner's part says beside its arrays."""
    snapshot = SnapshotStore(workdir / "snapshots", keep=2).open(number)
    return snapshot.part(learner_part(learner)).state


DRIVERS = {
    "remote": ("--config.driver=remote",),
    "local": ("--config.driver=local",),
    "hosts": (*HOSTS, "--config.remote.hosts=(2, 1)", *CODECS, "--config.outer.error_feedback=true"),
}


def killed_whole(driver, programs, tmp_path):
    """Has a run killed that has two snapshots; gives what starts it again with other settings."""
    changes = [*programs.training(tmp_path), *DRIVERS[driver], *TAKING]
    devices = f"{programs.environment['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    flags = {"XLA_FLAGS": devices} if driver == "hosts" else {}

    def start(*more):
        arguments = {setting.partition("=")[0]: setting for setting in (*changes, *more)}.values()
        return programs.start_module("experiments.train", *arguments, **flags)

    process = start("--config.train.steps=100000")
    try:

        def two_are_complete():
            assert process.poll() is None, process.communicate()
            return len(manifests(tmp_path)) >= 2

        until(two_are_complete, "the second snapshot", LIMIT)
    finally:
        process.kill()  # the rest of its processes go with it
        process.communicate()
    return start


@pytest.mark.parametrize(
    "driver", ["remote", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hosts", "local"))]
)
def test_a_run_that_is_killed_whole_goes_on_from_its_newest_snapshot(driver, programs, tmp_path):
    start = killed_whole(driver, programs, tmp_path)
    number, manifest = max(manifests(tmp_path).items())
    header = manifest["header"]
    clocks = header["clocks"]["learners"]
    at = {m: clocks[str(m)]["learners"][str(m)][1] for m in (0, 1)}
    taken = {m: part_state(tmp_path, number, m)["steps"] for m in (0, 1)}
    steps = max(at.values()) + 12
    resumed = programs.finish(start(f"--config.train.steps={steps}", "--config.resume=true"))
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming from snapshot {number}, step {header['step']}" in resumed.stderr

    summary = summary_of(tmp_path)
    assert (summary["finished"], summary["failures"], summary["step"]) == (True, [], steps)
    rounds = lines(tmp_path / "rounds.jsonl")
    made = [(told["fragment"], told["version"]) for told in rounds]
    assert len(set(made)) == len(made)
    for p, version in enumerate(header["versions"]):
        assert summary["outer_steps"][str(p)] == max(v for q, v in made if q == p) > version
        assert sorted(v for q, v in made if q == p) == list(range(1, summary["outer_steps"][str(p)] + 1))
    merged = [(told["fragment"], c[0], c[2]) for told in rounds for c in told["contributions"]]
    assert len(set(merged)) == len(merged)  # no work on a version was merged a second time
    assert {m for _, m, _ in merged} == {0, 1}
    for m in (0, 1):
        clocks = [told["step"] for told in lines(tmp_path / "learners" / str(m) / "steps.jsonl")]
        assert clocks == sorted(set(clocks))
        assert len(clocks) == summary["inner_steps"][str(m)]
        assert sum(clock <= at[m] for clock in clocks) == taken[m] < len(clocks)

    if driver != "local":  # they joined at the first start alone
        assert [r["inner_state"] for r in lines(tmp_path / "recoveries.jsonl")] == ["fresh", "fresh"]

    again = programs.run("replay", f"--workdir={tmp_path}")
    assert again.returncode == 0, again.stderr
    assert "the same as the run's" in again.stdout


@pytest.mark.slow
def test_a_learner_of_two_hosts_joins_anew_where_one_s_blocks_are_damaged(programs, tmp_path):
    start = killed_whole("hosts", programs, tmp_path)
    number, manifest = max(manifests(tmp_path).items())
    clocks = manifest["header"]["clocks"]["learners"]
    furthest = max(clocks[m]["learners"][m][1] for m in clocks)
    damaged = tmp_path / "snapshots" / f"{number:06d}" / learner_part(0) / "host_001"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 255]))
    resumed = programs.finish(start(f"--config.train.steps={furthest + 24}", "--config.resume=true"))
    assert resumed.returncode == 0, resumed.stderr
    summary = summary_of(tmp_path)
    assert (summary["finished"], summary["failures"]) == (True, [])
    joined = lines(tmp_path / "recoveries.jsonl")
    assert [r["learner"] for r in joined[2:]] == [0], "it alone, and once: no process had to begin again"
    assert f"host 1: {damaged.parent.name}/host_001 is damaged: the learner joins again" in resumed.stderr


def test_a_run_that_goes_on_with_fewer_learners_waits_for_none_of_the_others(programs, tmp_path):
    start = killed_whole("remote", programs, tmp_path)
    steps = 100 + max(manifest["header"]["step"] for manifest in manifests(tmp_path).values())
    seconds = (f"--config.sync.silence_timeout={10 * LIMIT}", f"--config.snapshot.timeout={11 * LIMIT}")
    fewer = ("--config.sync.num_learners=1", "--config.train.min_step_seconds=0.02", *seconds)
    resumed = programs.finish(start(f"--config.train.steps={steps}", "--config.resume=true", *fewer))
    assert resumed.returncode == 0, resumed.stderr
    summary = summary_of(tmp_path)
    assert (summary["finished"], summary["step"]) == (True, steps)


def test_without_a_snapshot_there_is_nothing_to_resume(programs, tmp_path):
    result = programs.train(tmp_path, "--config.resume=true")
    assert result.returncode == 2
    assert result.stderr.strip() == (
        f"error: config.resume: is true, but there is no complete snapshot in {tmp_path}/snapshots"
    )
