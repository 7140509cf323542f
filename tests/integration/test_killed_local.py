"""A run of threads that is killed goes on with what is in its workdir: nothing merged counts twice."""

import signal

import pytest

from experiments.studies.chaos.committed import check_work
from experiments.studies.replay.reading import read_tape
from tests.integration.hand import LOOP
from tests.integration.programs import LIMIT
from tests.integration.remote_runs import lines, merged_batches, summary_of, wait_for

RESUME = "--resume"
SETTINGS = (LOOP, "--config.train.min_step_seconds=(0.05, 0.05)", "--config.eval.every=None")
OFTEN = "--config.recovery.checkpoint_every=0.5"
LOCAL = (*SETTINGS, OFTEN, "--config.driver=local")
REMOTE = (*SETTINGS, OFTEN, "--config.driver=remote")


def end_after(programs, workdir, rounds, number, *settings):
    """Starts a run, and ends it by a signal once so many merges more are recorded."""
    had = len(lines(workdir / "rounds.jsonl"))
    process = programs.start("train", f"--workdir={workdir}", "--config.train.steps=1000000", *settings)
    try:
        merged = lambda: len(lines(workdir / "rounds.jsonl")) >= had + rounds  # noqa: E731
        wait_for([process], merged, f"{rounds} merges", 2 * LIMIT)
        process.send_signal(number)
    except BaseException:
        process.kill()
        raise
    return programs.finish(process)


def to_its_end(programs, workdir, steps, *settings):
    """Has a run go on to this step, and to its end."""
    return programs.run("train", f"--workdir={workdir}", f"--config.train.steps={steps}", *settings)


def resumed_with(workdir, learner):
    """What each process of a learner went on with, in order; None: it joined."""
    paths = (workdir / "tape").glob(f"learner-{learner}-*.tape")
    in_order = sorted(paths, key=lambda path: int(path.stem.rpartition("-")[2]))
    return [read_tape(path).header.resumed for path in in_order]


def assert_nothing_twice(rounds):
    """No version was made twice, and no token was merged twice; a kill loses lines that wait."""
    for p in range(3):
        versions = [r["version"] for r in rounds if r["fragment"] == p]
        assert versions == sorted(set(versions))
    assert check_work(rounds).twice_tokens == 0


def test_a_run_of_threads_that_is_killed_and_stopped_goes_on_to_its_end(programs, tmp_path):
    batches = [0, 0]
    for number, flag in ((signal.SIGKILL, ()), (signal.SIGTERM, (RESUME,))):
        ended = end_after(programs, tmp_path, 12, number, *LOCAL, *flag)
        assert ended.returncode == (143 if number == signal.SIGTERM else -number), ended.stderr
        now = [merged_batches(tmp_path, m) for m in ("0", "1")]
        assert all(later > before for later, before in zip(now, batches, strict=True))
        batches = now
    again = programs.run("replay", f"--workdir={tmp_path}")
    assert again.returncode == 0, again.stderr
    assert "the same as the run's" in again.stdout
    steps = max(r["step"] for r in lines(tmp_path / "rounds.jsonl")) + 24
    last = to_its_end(programs, tmp_path, steps, *LOCAL, "--resume=auto")
    assert last.returncode == 0, last.stderr
    summary = summary_of(tmp_path)
    assert (summary["finished"], summary["failures"], summary["step"]) == (True, [], steps)
    assert_nothing_twice(lines(tmp_path / "rounds.jsonl"))
    assert not (tmp_path / "previous").exists(), "nothing was set aside"
    processes = [resumed_with(tmp_path, m) for m in (0, 1)]
    assert [len(of_one) for of_one in processes] == [3, 3]
    assert [of_one[0] for of_one in processes] == [None, None]
    assert any(of_one[2] for of_one in processes), "who leaves keeps its state, of which most is current"
    over = to_its_end(programs, tmp_path, steps, *LOCAL, "--resume=auto")
    assert (over.returncode, over.stderr.strip()) == (0, f"the run in {tmp_path} is over")


def test_where_no_run_has_begun_none_goes_on(programs, tmp_path):
    result = programs.run("train", f"--workdir={tmp_path}", *LOCAL, RESUME)
    assert result.returncode == 1
    assert result.stderr.strip() == f"error: {tmp_path}: has no run to resume"


def test_a_virtual_run_is_not_resumed(programs, tmp_path):
    result = programs.train(tmp_path, "--config.driver=virtual", RESUME)
    assert result.returncode == 2
    assert result.stderr.strip() == (
        "error: resume: is of no use to a virtual run, which starts again from its seed"
    )


@pytest.mark.slow
def test_processes_of_a_launcher_that_is_killed_go_on(programs, tmp_path):
    assert end_after(programs, tmp_path, 9, signal.SIGKILL, *REMOTE).returncode == -signal.SIGKILL
    steps = max(r["step"] for r in lines(tmp_path / "rounds.jsonl")) + 60
    last = to_its_end(programs, tmp_path, steps, *REMOTE, RESUME)
    assert last.returncode == 0, last.stderr
    assert_nothing_twice(lines(tmp_path / "rounds.jsonl"))
    assert summary_of(tmp_path)["finished"]
