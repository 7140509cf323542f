"""The timing of a run of processes, and of one of threads, is set by command while it goes on."""

import itertools
import json

import pytest

from tests.integration.hand import UNENDING
from tests.integration.remote_runs import lines
from tests.refusals import assert_refused

STEPS = 160
SHORT = [s for s in UNENDING if "train.steps" not in s]
SETTINGS = (*SHORT, f"--config.train.steps={STEPS}", "--config.remote.syncer_shards=2")


def gaps(rounds, fragment):
    """Steps between the rounds of a fragment."""
    return [b - a for a, b in itertools.pairwise(r["step"] for r in rounds if r["fragment"] == fragment)]


def test_two_shards_follow_an_order_also_after_a_restart_and_the_run_is_replayed_to_the_bit(
    programs, new_job
):
    job = new_job(SETTINGS)
    first, other = job.syncer(), job.shard(1)
    learners = [job.learner(m) for m in (0, 1)]
    alive = [first, other, *learners]
    job.wait_for(lambda: job.merges(0) and job.merges(1), "merges of both", alive)

    def control(*words):
        done = programs.run("control", f"--syncer={job.address}", job.token, *words)
        return done.returncode, done.stdout.strip(), done.stderr.strip()

    assert control("set", "sync.overlap=9")[2] == (
        "error: config.sync.overlap: is 9, but must be at most 2, for which memory was planned"
    )
    assert control("set", "sync.interval=8", "--reason=links") == (0, "from now on sync.interval=8", "")
    assert "; sync.interval=8\n" in control("status")[1]
    events = lambda: (job.workdir / "events.jsonl").read_text()  # noqa: E731
    job.wait_for(lambda: events().count('"timing_set"') == 2, "both shards to follow", alive)
    other.kill()
    other.wait()
    other = job.shard(1)
    job.wait_for(lambda: events().count('"timing_set"') == 3, "the restarted one to follow", [first, other])
    assert [job.left(process)[0] for process in (*learners, first, other)] == [0, 0, 0, 0]
    set_at = [line for line in map(json.loads, events().splitlines()) if line["event"] == "timing_set"]
    assert {line["reason"] for line in set_at} == {"links"}
    begins = max(line["step"] for line in set_at) + 8
    later = [r for r in job.rounds() if begins < r["step"] < STEPS]  # the last rounds come where the run ends
    assert len(later) > 9 and all(set(gaps(later, p)) <= {8, 16, 24} for p in range(3))
    done = programs.run("replay", f"--workdir={job.workdir}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("the same as the run's\n")
    tape = programs.run("tape", f"--workdir={job.workdir}", "--learner=0").stdout
    assert tape.count("timing: H = 8") >= 5  # of the shards, one twice, and of the learner


@pytest.mark.slow
def test_a_sender_is_throttled_half_way_the_run_is_retimed_and_replayed_to_the_bit(programs, new_job):
    settings = ("--config.train.steps=400", "--config.sync.rebase=true", "--config.outer.codec=f32,int4")
    job = new_job((*SHORT, *settings))
    syncer, *learners = alive = job.syncer(), job.learner(0), job.learner(1)
    work = lambda: [c[4] for _, c in job.merges(0)]  # noqa: E731
    job.wait_for(lambda: len(work()) > 12, "merges of both", alive)
    shared = f"--syncer={job.address}", job.token
    # Fragments of 14 KB: one in seven steps, where three are due in four.
    done = programs.run("links", *shared, "--learner_id=0", "--limit=320kbit")
    assert done.returncode == 0, done.stderr
    job.wait_for(lambda: max(work()[-3:]) > 12, "learner 0 to miss turns", alive)
    done = programs.run("control", *shared, "set", "sync.interval=32", "--reason=throttled")
    assert done.returncode == 0, done.stderr
    assert [job.left(process)[0] for process in (*learners, syncer)] == [0, 0, 0]
    (change,) = [r for r in lines(job.workdir / "events.jsonl") if r["event"] == "timing_set"]
    assert (change["interval"], change["reason"]) == (32, "throttled")
    later = [r for r in job.rounds() if change["step"] + 32 < r["step"] < 400]
    assert len(later) > 6 and sum(0 in r["learners"] for r in later) > 0.7 * len(later), "no turn is missed"
    done = programs.run("replay", f"--workdir={job.workdir}")
    assert done.stdout.endswith("the same as the run's\n"), done.stderr


def test_a_run_of_threads_follows_its_folder(programs, started, tmp_path):
    workdir, config = tmp_path / "run", "--config=tests/integration/small_loop.py"
    settings = [s for s in SHORT if "remote" not in s and "eval" not in s]
    run = started("train", f"--workdir={workdir}", config, "--config.train.steps=120", *settings)
    rounds = workdir / "rounds.jsonl"
    while not (rounds.exists() and rounds.read_text().count("\n") > 3):
        assert run.poll() is None, run.communicate()
    done = programs.run("control", f"--workdir={workdir}", "set", "sync.interval=10")
    assert (done.returncode, done.stdout) == (0, "from now on sync.interval=10\n"), done.stderr
    assert run.wait(120) == 0
    made = [json.loads(line) for line in rounds.read_text().splitlines()]
    assert gaps(made, 0)[-1] == 10
    done = programs.run("plan", f"--workdir={workdir}")
    assert done.returncode == 0 and "| the run, recorded " in done.stdout, done.stderr
    assert "| H=10 f32 K=1 tau=2 (now)" in done.stdout
    plan = json.loads((workdir / "plan.json").read_text())
    assert plan["choices"][0]["settings"]["sync.interval"] == 10 and len(plan["choices"]) > 9
    done = programs.run("replay", f"--workdir={workdir}")
    assert done.stdout.endswith("the same as the run's\n"), done.stderr


@pytest.mark.parametrize("words", [["set"], ["set", "sync.interval"], ["set", "outer.codec=int4"]])
def test_what_is_no_timing_is_refused(programs, words):
    assert_refused(programs.run("control", *words), "set: needs SETTING=NUMBER, such as sync.interval=12")
