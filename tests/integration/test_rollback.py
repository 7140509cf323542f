"""A run of processes that is set back, and goes on from there."""

import time

from ddiloco.disk import kept
from tests.integration.hand import UNENDING, Job

TWO = (*UNENDING, "--config.sync.num_learners=2", "--config.train.min_step_seconds=(0.05, 0.05)")


def test_a_run_that_was_set_back_goes_on_from_that_step(programs, tmp_path):
    job = Job(programs, tmp_path / "run", TWO)
    syncer, learners = job.syncer(), [job.learner(0), job.learner(1)]
    enough = lambda: min((r["version"] for r in job.rounds()[-3:]), default=0) > 4  # noqa: E731
    job.wait_for(enough, "five versions of every fragment", [syncer, *learners])
    assert job.end(syncer)[0] == 143
    assert [job.left(process)[0] for process in learners] == [0, 0]
    known = kept.versions(job.workdir / "syncer")
    step = max(of_it[0].step for of_it in known.values())
    wanted = tuple(one.version for one in kept.as_of(job.workdir / "syncer", step).values())

    refused = programs.run("rollback", f"--workdir={job.workdir}", f"--to={step - 1}")
    assert refused.returncode == 2
    assert "kept from step" in refused.stderr
    done = programs.run("rollback", f"--workdir={job.workdir}", f"--to={step}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"back at step {step}, versions {', '.join(map(str, wanted))}\n")
    assert all(r["version"] <= wanted[r["fragment"]] for r in job.rounds())

    back = time.time()
    alive = [job.syncer("--resume"), job.learner(0), job.learner(1)]
    job.wait_for(lambda: job.merges(0, back) and job.merges(1, back), "merges of both", alive)
    first = {}
    for r in job.rounds(back):
        first.setdefault(r["fragment"], r["version"])
    assert all(version == wanted[p] + 1 for p, version in first.items())
    job.kill_all()
