"""A run of threads that is killed goes on with what is in its workdir: nothing merged counts twice."""

import pytest

from tests.integration.programs import LIMIT
from tests.integration.remote_runs import STEADY, UNENDING, lines, merged_batches, summary_of, wait_for

LOCAL = "--config.driver=local"


def kill_after(programs, workdir, rounds, *more):
    """Starts a run of threads, and kills it once so many merges are recorded."""
    process = programs.start("train", *programs.training(workdir), LOCAL, *UNENDING, *more)
    try:
        merged = lambda: len(lines(workdir / "rounds.jsonl")) >= rounds  # noqa: E731
        wait_for([process], merged, f"{rounds} merges")
    finally:
        process.kill()
        process.communicate()


def assert_nothing_twice(rounds):
    """No version was made twice, and no work on one was merged twice; a kill loses lines that wait."""
    made = [(r["fragment"], r["version"]) for r in rounds]
    for p in range(3):
        versions = [version for q, version in made if q == p]
        assert versions == sorted(set(versions))
    merged = [(r["fragment"], c[0], c[2]) for r in rounds for c in r["contributions"]]
    assert len(set(merged)) == len(merged)


def test_a_run_of_threads_that_is_killed_again_and_again_goes_on_with_its_merges(programs, tmp_path):
    batches = [0, 0]
    for kill in range(2):
        kill_after(programs, tmp_path, 9 * (kill + 1), *["--resume"] * bool(kill))
        now = [merged_batches(tmp_path, m) for m in ("0", "1")]
        assert all(later > before for later, before in zip(now, batches, strict=True))
        batches = now
    steps = max(r["step"] for r in lines(tmp_path / "rounds.jsonl")) + 60
    last = programs.train(tmp_path, LOCAL, *STEADY, f"--config.train.steps={steps}", "--resume=auto")
    assert last.returncode == 0, last.stderr
    assert_nothing_twice(lines(tmp_path / "rounds.jsonl"))
    summary = summary_of(tmp_path)
    assert (summary["finished"], summary["failures"], summary["step"]) == (True, [], steps)
    assert not (tmp_path / "previous").exists(), "nothing was set aside"
    again = programs.run("replay", f"--workdir={tmp_path}")
    assert again.returncode == 0, again.stderr
    assert "the same as the run's" in again.stdout
    over = programs.train(tmp_path, LOCAL, *STEADY, f"--config.train.steps={steps}", "--resume=auto")
    assert (over.returncode, over.stderr.strip()) == (0, f"the run in {tmp_path} is over")


def test_where_no_run_has_begun_none_goes_on(programs, tmp_path):
    result = programs.train(tmp_path, LOCAL, "--resume")
    assert result.returncode == 1
    assert result.stderr.strip() == f"error: {tmp_path}: no run has begun there that could go on"


@pytest.mark.parametrize("algorithm", ["data_parallel", "decoupled"])
def test_what_keeps_no_merges_is_not_resumed(algorithm, programs, tmp_path):
    driver = LOCAL if algorithm == "data_parallel" else "--config.driver=virtual"
    result = programs.train(tmp_path, driver, f"--config.algorithm={algorithm}", "--resume")
    which = "data_parallel" if algorithm == "data_parallel" else "a virtual run"
    assert result.returncode == 2
    assert result.stderr.strip() == (
        f"error: resume: is of no use to {which}, which merges nothing that outlives its process"
    )


@pytest.mark.slow
def test_processes_of_a_launcher_that_is_killed_go_on(programs, tmp_path):
    process = programs.start("train", *programs.training(tmp_path), "--config.driver=remote", *UNENDING)
    try:
        wait_for([process], lambda: len(lines(tmp_path / "rounds.jsonl")) >= 9, "9 merges", LIMIT)
    finally:
        process.kill()
        process.communicate()
    steps = max(r["step"] for r in lines(tmp_path / "rounds.jsonl")) + 60
    more = ("--config.driver=remote", *STEADY, f"--config.train.steps={steps}", "--resume")
    last = programs.train(tmp_path, *more)
    assert last.returncode == 0, last.stderr
    assert_nothing_twice(lines(tmp_path / "rounds.jsonl"))
    assert summary_of(tmp_path)["finished"]
