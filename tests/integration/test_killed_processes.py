"""One run of real processes of which a learner and then the syncer are killed, and what is claimed of it."""

import dataclasses
import functools
import itertools
import os
import pathlib
import re
import signal
import subprocess
import time

import pytest

from ddiloco.storage.workdir import LOCK, is_locked, owned
from tests.integration.hand import LOOP
from tests.integration.remote_runs import (
    UNENDING,
    lines,
    merged_batches,
    processes_of,
    steps_of,
    summary_of,
    wait_for,
)
from tests.remote.ends import alive

OF_LOOP = (
    LOOP,
    "--config.driver=remote",
    "--config.train.steps=1000000",
    "--config.train.min_step_seconds=(0.05, 0.05)",
    "--config.eval.every=None",
    "--config.recovery.checkpoint_every=1.0",
    "--config.remote.receipts=True",
    "--config.remote.keep_offers=1.0",
)


@dataclasses.dataclass
class Story:
    """What happened; processes are by role, with their numbers."""

    workdir: pathlib.Path
    first: dict[str, int]  # the processes before anything happened
    second: dict[str, int]  # after learner 0 was killed and is back
    third: dict[str, int]  # after the syncer was killed too, and is back
    committed: list[dict]  # the rounds before the syncer was killed
    syncer_killed_at: float
    done: subprocess.CompletedProcess

    @property
    def rounds(self):
        return lines(self.workdir / "rounds.jsonl")

    @property
    def summary(self):
        return summary_of(self.workdir)


def recoveries(workdir):
    return lines(workdir / "recoveries.jsonl")


@pytest.fixture(scope="module")
def story(programs, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("killed")
    process = programs.start("train", *OF_LOOP, f"--workdir={workdir}")
    rounds = workdir / "rounds.jsonl"

    wait = functools.partial(wait_for, [process])

    def merged_since(moment, *wanted):
        """Whether each of these learners was in a merge after that moment."""
        return set(wanted) <= {m for r in lines(rounds) if r["time"] > moment for m in r["learners"]}

    try:
        wait(lambda: all(len(steps_of(workdir, m)) > 20 for m in (0, 1)), "twenty steps of both")
        first = processes_of(process)
        os.kill(first["0"], signal.SIGKILL)
        killed = time.time()
        alone = lambda: any(r["time"] > killed and r["learners"] == [1] for r in lines(rounds))  # noqa: E731
        wait(alone, "a merge of 1")
        wait(lambda: steps_of(workdir, 0)[-1]["time"] > killed + 0.5, "a step of another process")
        back = time.time()
        wait(lambda: merged_since(back, 0, 1), "merges of both")
        recovered = lambda: any(r["time"] > killed and r["learner"] == 0 for r in recoveries(workdir))  # noqa: E731
        wait(recovered, "the record of its recovery")
        second = processes_of(process)
        os.kill(second["syncer"], signal.SIGKILL)
        killed, committed = time.time(), lines(rounds)
        again = lambda: [r for r in lines(rounds) if r["time"] > killed]  # noqa: E731
        wait(lambda: {r["fragment"] for r in again()} == {0, 1, 2}, "a merge of each fragment")
        wait(lambda: any({0, 1} == set(r["learners"]) for r in again()), "both learners in a merge")
        third = processes_of(process)
        server = int(pathlib.Path(f"/proc/{third['syncer']}/stat").read_text().rpartition(")")[2].split()[1])
        for one in (server, *third.values(), process.pid):  # as systemd and Slurm do
            os.kill(one, signal.SIGTERM)
        done = programs.finish(process)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return Story(workdir, first, second, third, committed, killed, done)


def test_who_is_killed_is_started_again_and_nobody_else(story):
    assert sorted(story.first) == sorted(story.second) == sorted(story.third) == ["0", "1", "syncer"]
    changed = [
        {role for role in before if before[role] != after[role]}
        for before, after in itertools.pairwise((story.first, story.second, story.third))
    ]
    assert changed == [{"0"}, {"syncer"}]


def test_a_line_tells_of_each_death_and_a_signal_ends_all_of_them(story):
    told = story.done.stderr.splitlines()
    for role in ("learner 0", "the syncer"):
        assert f"the process of {role} was killed by SIGKILL; another is started in 0.25 s" in told
    assert story.done.returncode == 143
    assert not any(map(alive, story.third.values()))
    assert (story.summary["driver"], story.summary["interrupted"]) == ("remote", True)
    assert list(story.workdir.glob("checkpoints/*/params"))


def test_the_other_learner_stepped_on_and_the_run_counts_as_up(story):
    longest = [
        max(b["time"] - a["time"] for a, b in itertools.pairwise(steps_of(story.workdir, m))) for m in (0, 1)
    ]
    assert longest[1] < longest[0]
    assert (story.summary["uptime"], story.summary["failures"]) == (1.0, [])
    assert 0 < story.summary["lost"]["failed"] < 1


def test_a_learner_that_comes_back_has_the_inner_state_of_its_peer(story):
    first, second, *later = recoveries(story.workdir)
    assert [first["inner_state"], second["inner_state"]] == ["fresh", "fresh"]
    assert next(r for r in later if r["learner"] == 0)["inner_state"] == "peer"


def test_what_was_committed_before_the_syncer_died_is_not_merged_again(story):
    last = {r["fragment"]: r for r in story.committed}
    for fragment, before in last.items():
        after = next(
            r for r in story.rounds if r["time"] > story.syncer_killed_at and r["fragment"] == fragment
        )
        assert after["version"] > before["version"] and after["step"] > before["step"]
    made = [(r["fragment"], r["version"]) for r in story.rounds]
    assert len(made) == len(set(made)), "no version is made twice"


def test_every_step_and_token_is_counted_once(story):
    summary = story.summary
    last = {str(p): max(r["version"] for r in story.rounds if r["fragment"] == p) for p in range(3)}
    assert summary["outer_steps"] == last, "the counts are those of the whole run"
    for learner in ("0", "1"):
        taken = steps_of(story.workdir, learner)
        assert summary["inner_steps"][learner] == len(taken)
        assert summary["tokens"][learner] == sum(line["tokens"] for line in taken)
        drawn = merged_batches(story.workdir, learner)
        claim = "only steps that were lost with the kills are taken again; some records of others were, too"
        assert -16 <= len(taken) - drawn <= 64, claim


def test_its_tapes_replay_to_its_own_parameters(programs, story):
    names = {path.name.partition("-")[0] for path in (story.workdir / "tape").glob("*.tape")}
    assert names == {"learner", "syncer"}
    assert len(list((story.workdir / "tape").glob("learner-0-*.tape"))) == 2
    assert len(list((story.workdir / "tape").glob("syncer-*.tape"))) == 2
    done = programs.run("replay", f"--workdir={story.workdir}")
    assert done.returncode == 0, done.stderr
    assert f"params_sha256 {story.summary['params_sha256']}\nthe same as the run's" in done.stdout
    count, compared = map(int, re.findall(r"(\d+) (?:versions|of them)", done.stdout))
    heard_of = sum(story.summary["outer_steps"].values())  # of a merge under way at the end it was not
    assert heard_of <= compared <= count <= heard_of + 1


def test_others_can_check_its_log_its_merges_and_that_all_were_told_the_same(programs, story):
    receipts = story.workdir / "receipts"
    log = (f"--log={story.workdir}", f"--heads={receipts}", f"--offers={story.workdir}")
    done = programs.run("verify", *log)
    assert (done.returncode, done.stderr) == (0, "")
    first, *accounts, last = done.stdout.splitlines()
    found = re.fullmatch(
        r"(\d+) versions and \d+ signatures checked; (\d+) merges made again and compared", first
    )
    versions, again = map(int, found.groups())
    assert versions >= len(story.rounds) and again >= len(story.committed)
    assert [line.partition(":")[0] for line in accounts] == ["learner-0", "learner-1"]
    assert last == "the log is what was signed, and what the rules decide"
    assert '"problem"' not in "".join(path.read_text() for path in receipts.iterdir())


def test_its_timeline_shows_who_was_killed_and_who_went_on(programs, story):
    done = programs.run("tape", f"--workdir={story.workdir}", "--learner=0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("its tape ends here: killed, or still running") == 2
    assert re.search(r"goes on with inner state \d+ of learner 1's process", done.stdout)
    assert not re.search(r"^\S+  learner 1 ", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_what_is_in_the_way_of_a_process_that_starts_again_may_pass(programs, started, tmp_path):
    workdir, data = tmp_path / "run", tmp_path / "data"
    data.symlink_to(programs.data_dir)
    changes = ["--config.driver=remote", *UNENDING, f"--config.data.data_dir={data}"]
    process = started("train", *programs.training(workdir), *changes)
    wait = functools.partial(wait_for, [process])
    rounds = lambda since: [r for r in lines(workdir / "rounds.jsonl") if r["time"] > since]  # noqa: E731

    def killed(role):
        """Ends its process, and gives what waits for the end of the next one."""
        gone, later = processes_of(process)[role], set()
        os.kill(gone, signal.SIGKILL)

        def ended():
            later.update({processes_of(process).get(role, gone)} - {gone})
            return later and not all(map(alive, later))

        return lambda: wait(ended, f"the end of the next {role}")

    wait(lambda: {m for r in rounds(0.0) for m in r["learners"]} == {0, 1}, "merges of both")
    data.unlink()
    data.touch()  # as where no disk is mounted
    killed("0")()
    data.unlink()
    data.symlink_to(programs.data_dir)
    since = time.time()
    wait(lambda: any(0 in r["learners"] for r in rounds(since)), "a merge of the learner")
    refused = killed("syncer")
    wait(lambda: not is_locked(workdir / LOCK), "the lock")
    with owned(workdir):
        refused()
    since = time.time()
    wait(lambda: rounds(since), "a merge after that")
    process.send_signal(signal.SIGTERM)
    assert programs.finish(process).returncode == 143
