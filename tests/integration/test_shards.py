"""A syncer of several shards, of which any may die and come back."""

import signal

import pytest

from ddiloco.remote.wire.management import Command, ask
from tests.integration.hand import LIMIT, SECURITY, assert_counted_once, assert_nothing_twice
from tests.integration.remote_runs import summary_of

CHANGES = ("--config.remote.syncer_shards=2",)
TWO = ("--config.driver=remote", "--config.remote.syncer_shards=2")
PATIENT = ("--config.sync.silence_timeout=60", "--config.remote.longest_backoff=50")
WAITING = (
    "--config=configs/dense.py:streaming",
    "--config.sync.max_run_ahead=0",
    "--config.sync.interval=6",
    "--config.train.min_step_seconds=()",
)


@pytest.mark.slow
def test_where_all_are_waited_for_two_shards_come_to_the_parameters_of_threads(programs, tmp_path):
    found = []
    for name, changes in (("threads", ["--config.driver=local"]), ("shards", TWO)):
        done = programs.train(tmp_path / name, *WAITING, *changes)
        assert (done.returncode, done.stderr) == (0, "")
        summary = summary_of(tmp_path / name)
        assert (summary["finished"], summary["drops"]) == (True, {})
        of_all = ("params_sha256", "eval_loss", "outer_steps", "bytes_sent", "bytes_received")
        found.append([summary[name] for name in of_all])
    assert found[0] == found[1]
    assert found[0][2] == {"0": 2, "1": 3, "2": 3}  # with those of the last step, 12
    done = programs.run("tape", f"--workdir={tmp_path / 'shards'}")
    assert done.returncode == 0, done.stderr
    assert "shard 1     learner 0 reports step 6" in done.stdout


def more_of(job, fragments, by=2):
    """Whether each of these fragments gets so many more versions from now on."""
    before = job.durable()
    return lambda: all(job.durable()[p] >= before[p] + by for p in fragments)


@pytest.mark.slow
def test_any_process_dies_and_nothing_is_lost_or_merged_twice(programs, job):
    first, learners = job.syncer(), [job.learner(m) for m in (0, 1)]
    other = job.shard(1, affliction="merge:3")
    other.wait(LIMIT)
    assert other.returncode == -signal.SIGKILL, other.communicate()
    before = job.durable()
    assert before[1] == 2, "the third merge was not committed"
    job.wait_for(more_of(job, [0, 2]), "merges of the first shard", [first, *learners])
    assert job.durable()[1] == before[1]
    other = job.shard(1, affliction="write:4")
    other.wait(LIMIT)
    assert other.returncode == -signal.SIGKILL, other.communicate()
    assert job.durable()[1] == before[1] + 3
    other = job.shard(1)
    job.wait_for(more_of(job, [0, 1, 2]), "merges of all", [first, other, *learners])
    first.kill()
    own = [job.own_step(m) for m in (0, 1)]
    on = lambda: all(job.own_step(m) > own[m] + 10 for m in (0, 1))  # noqa: E731
    job.wait_for(on, "steps without the first shard", [other, *learners])
    job.wait_for(more_of(job, [1]), "merges without it", [other, *learners])
    first = job.syncer("--resume")
    job.wait_for(more_of(job, [0, 1, 2]), "merges with it again", [first, other, *learners])
    both = lambda: any(r["learners"] == [0, 1] for r in job.rounds())  # noqa: E731
    job.wait_for(both, "a merge of both", [first, other, *learners])
    assert job.end(first)[0] == 143
    assert [job.left(process)[0] for process in (*learners, other)] == [0, 0, 0]
    assert_nothing_twice(job)
    assert_counted_once(job, (0, 1))
    assert job.summary()["outer_steps"] == {str(p): version for p, version in enumerate(job.durable())}
    # The same run with another number of shards.
    three = "--config.remote.syncer_shards=3"
    first, others = job.syncer("--resume", three), [job.shard(shard, three) for shard in (1, 2)]
    learners = [job.learner(m, three) for m in (0, 1)]
    job.wait_for(more_of(job, [0, 1, 2], by=1), "merges of three", [first, *others, *learners])
    old = job.learner(0)  # which knows of two
    code, _, told = job.left(old)
    assert code == 2 and "config.remote.syncer_shards: the syncer has 3, the learner 2" in told
    assert job.end(first)[0] == 143
    assert [job.left(process)[0] for process in (*learners, *others)] == [0] * 4
    assert_nothing_twice(job)
    versions = sum(job.summary()["outer_steps"].values())
    done = programs.run("replay", f"--workdir={job.workdir}")
    assert (done.returncode, f"{versions} versions merged again" in done.stdout) == (0, True), done
    assert done.stdout.endswith("the same as the run's\n")


def test_a_stop_reaches_a_shard_that_is_down_and_holds_for_whoever_an_engine_starts_then(job):
    first, other, *learners = job.syncer(), job.shard(1), job.learner(0), job.learner(1)
    job.wait_for(lambda: job.merges(0) and job.merges(1), "merges of both", [first, other, *learners])
    other.kill()
    other.wait(LIMIT)
    assert ask(job.address, SECURITY, Command("stop"), LIMIT).done
    assert [job.left(role)[0] for role in learners] == [0, 0]
    assert job.left(job.shard(1))[0] == 0  # which the engine has started again
    assert job.left(first)[0] == 0
    before = job.rounds()
    again = [job.syncer("--resume=auto", *PATIENT), job.shard(1, "--resume=auto")]
    again += [job.learner(m, *PATIENT) for m in (0, 1)]  # for one that does not come it would wait long
    found = [job.left(role) for role in again]
    assert [code for code, *_ in found] == [0] * 4, found
    stopped = f"the run in {job.workdir} was stopped by its operator: --resume goes on with it"
    assert stopped in found[0][2] and stopped in found[1][2]
    assert job.rounds() == before


@pytest.mark.slow
def test_a_run_ends_with_all_merged_though_a_shard_dies(job):
    """It dies once it has merged twice; what it was to merge is merged by the process that follows."""
    ends = ("--config.train.steps=60", "--config.train.min_step_seconds=(0.1, 0.1)")
    first, *learners = job.syncer(*ends), job.learner(0, *ends), job.learner(1, *ends)
    other = job.shard(1, *ends, affliction="merge:3")
    other.wait(LIMIT)
    assert other.returncode == -signal.SIGKILL, other.communicate()
    other = job.shard(1, *ends)
    assert [job.left(role)[0] for role in (first, other, *learners)] == [0] * 4
    summary, durable = job.summary(), job.durable()
    assert summary["finished"] and summary["step"] == 60
    assert summary["outer_steps"] == {str(p): version for p, version in enumerate(durable)}
    assert_nothing_twice(job)
    last = {r["fragment"]: r["step"] for r in job.rounds()}
    assert all(step > 60 - 6 for step in last.values()), last
