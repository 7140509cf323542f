"""A syncer of several processes: an authority and parts, of which any may die and come back."""

import signal

from ddiloco.remote.wire.management import Command, ask
from tests.integration.hand import LIMIT, SECURITY, assert_counted_once, assert_nothing_twice
from tests.integration.remote_runs import summary_of

CHANGES = ("--config.remote.parts=2",)
TWO = ("--config.driver=remote", "--config.remote.parts=2")
PATIENT = ("--config.sync.silence_timeout=60", "--config.remote.longest_backoff=50")
WAITING = (
    "--config=configs/dense.py:streaming",
    "--config.sync.max_run_ahead=0",
    "--config.sync.interval=6",
    "--config.train.min_step_seconds=()",
)


def test_where_all_are_waited_for_two_parts_come_to_the_parameters_of_threads(programs, tmp_path):
    found = []
    for name, changes in (("threads", ["--config.driver=local"]), ("parts", TWO)):
        done = programs.train(tmp_path / name, *WAITING, *changes)
        assert (done.returncode, done.stderr) == (0, "")
        summary = summary_of(tmp_path / name)
        assert (summary["finished"], summary["drops"]) == (True, {})
        of_all = ("params_sha256", "eval_loss", "outer_steps", "bytes_sent", "bytes_received")
        found.append([summary[name] for name in of_all])
    assert found[0] == found[1]
    assert found[0][2] == {"0": 2, "1": 2, "2": 2}
    done = programs.run("tape", f"--workdir={tmp_path / 'parts'}")
    assert done.returncode == 0, done.stderr
    for line in (
        "part 1      hears that learner 0 reports step 6",
        "syncer      part 0 made fragment 0 version 2",
    ):
        assert line in done.stdout


def more_of(job, fragments, by=2):
    """Whether each of these fragments gets so many more versions from now on."""
    before = job.durable()
    return lambda: all(job.durable()[p] >= before[p] + by for p in fragments)


def test_any_process_dies_and_nothing_is_lost_or_merged_twice(programs, job):
    syncer, learners = job.syncer(), [job.learner(m) for m in (0, 1)]
    parts = [job.part(0), job.part(1, affliction="merge:3")]
    parts[1].wait(LIMIT)
    assert parts[1].returncode == -signal.SIGKILL, parts[1].communicate()
    before = job.durable()
    assert before[1] == 2, "the third merge was not committed"
    job.wait_for(more_of(job, [0, 2]), "merges of the other part", [syncer, parts[0], *learners])
    assert job.durable()[1] == before[1]
    parts[1] = job.part(1, affliction="write:4")
    parts[1].wait(LIMIT)
    assert parts[1].returncode == -signal.SIGKILL, parts[1].communicate()
    assert job.durable()[1] == before[1] + 3
    parts[1] = job.part(1)
    job.wait_for(more_of(job, [0, 1, 2]), "merges of all", [syncer, *parts, *learners])
    syncer.kill()
    own = [job.own_step(m) for m in (0, 1)]
    on = lambda: all(job.own_step(m) > own[m] + 10 for m in (0, 1))  # noqa: E731
    job.wait_for(on, "steps without an authority", [*parts, *learners])
    syncer = job.syncer("--resume")
    job.wait_for(more_of(job, [0, 1, 2]), "merges with the new authority", [syncer, *parts, *learners])
    both = lambda: any(r["learners"] == [0, 1] for r in job.rounds())  # noqa: E731
    job.wait_for(both, "a merge of both", [syncer, *parts, *learners])
    assert job.end(syncer)[0] == 143
    assert [job.left(process)[0] for process in (*learners, *parts)] == [0, 0, 0, 0]
    assert_nothing_twice(job)
    assert_counted_once(job, (0, 1))
    for p, version in enumerate(job.durable()):
        made = [r["version"] for r in job.rounds() if r["fragment"] == p]
        assert made == sorted(made) and made[-1] == version
    assert job.summary()["outer_steps"] == {str(p): version for p, version in enumerate(job.durable())}
    # The same run with another number of parts.
    three = "--config.remote.parts=3"
    syncer, parts = job.syncer("--resume", three), [job.part(part, three) for part in range(3)]
    learners = [job.learner(m, three) for m in (0, 1)]
    job.wait_for(more_of(job, [0, 1, 2], by=1), "merges of three", [syncer, *parts, *learners])
    old = job.part(1)  # of two
    assert job.left(old)[0] == 1
    assert job.end(syncer)[0] == 143
    assert [job.left(process)[0] for process in (*learners, *parts)] == [0] * 5
    assert_nothing_twice(job)
    versions = sum(job.summary()["outer_steps"].values())
    done = programs.run("replay", f"--workdir={job.workdir}")
    assert (done.returncode, f"{versions} versions merged again" in done.stdout) == (0, True), done
    assert done.stdout.endswith("the same as the run's\n")


def test_a_run_that_its_operator_stopped_is_over_for_whoever_an_engine_starts_then(job):
    def all_roles(*more):
        others = [role(number, *more) for role in (job.part, job.learner) for number in (0, 1)]
        return [job.syncer("--resume=auto", *more), *others]

    roles = all_roles()
    job.wait_for(lambda: job.merges(0) and job.merges(1), "merges of both", roles)
    assert ask(job.address, SECURITY, Command("stop"), LIMIT).done
    assert [job.left(role)[0] for role in roles] == [0] * 5
    before = job.rounds()
    again = [job.left(role) for role in all_roles(*PATIENT)]
    assert [code for code, *_ in again] == [0] * 5, again
    assert f"the run in {job.workdir} was stopped by its operator: --resume goes on with it" in again[0][2]
    assert job.rounds() == before
