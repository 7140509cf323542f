"""A run of processes that is set back under its learners, and goes on from there."""

import time

from ddiloco.protocol.policy import MAX_AGE
from ddiloco.storage import fragment_history
from tests.integration.remote_runs import lines
from tests.refusals import assert_refused


def test_a_run_that_was_set_back_goes_on_with_learners_of_the_undone_history(programs, job):
    syncer, learners = job.syncer(), [job.learner(0), job.learner(1)]
    enough = lambda: min((r["version"] for r in job.rounds()[-3:]), default=0) > 4  # noqa: E731
    job.wait_for(enough, "five versions of every fragment", [syncer, *learners])
    refused = programs.run("rollback", f"--workdir={job.workdir}", "--to=0")
    assert_refused(refused, f"workdir: {job.workdir}: belongs to a run in progress")
    syncer.kill()
    syncer.wait()
    known = fragment_history.versions(job.workdir / "syncer")
    newest = tuple(of_it[-1].version for of_it in known.values())
    step = max(of_it[0].step for of_it in known.values())
    wanted = tuple(one.version for one in fragment_history.as_of(job.workdir / "syncer", step).values())
    assert wanted != newest

    refused = programs.run("rollback", f"--workdir={job.workdir}", f"--to={step - 1}")
    assert_refused(refused, f"to: is {step - 1}, but versions of all fragments are kept from step")
    done = programs.run("rollback", f"--workdir={job.workdir}", f"--to={step}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"back at step {step}, versions {', '.join(map(str, wanted))}\n")
    assert all(r["version"] <= wanted[r["fragment"]] for r in job.rounds())

    back = time.time()
    alive = [job.syncer("--resume"), *learners]
    job.wait_for(lambda: job.merges(0, back) and job.merges(1, back), "merges of both", alive)
    again = lambda: all(r["version"] > max(newest) for r in job.rounds(back)[-3:])  # noqa: E731
    job.wait_for(again, "versions whose numbers others bore", alive)
    returned = lines(job.workdir / "recoveries.jsonl")[-2:]
    assert max(r["seconds"] for r in returned) < 20.0, "they waited for each other"
    first = {}
    for r in job.rounds(back):
        first.setdefault(r["fragment"], r)
        for _, _, worked_on, step_of_it, steps, _ in r["contributions"]:
            assert 0 <= r["version"] - 1 - worked_on <= MAX_AGE
            assert steps <= step_of_it - step, "no step of before the welcome is merged"
    assert all(r["version"] == wanted[p] + 1 for p, r in first.items())
