"""A syncer that fails in a merge, or is killed in one and in a write: what was committed stays."""

import signal

from tests.integration.hand import LIMIT, assert_counted_once, assert_nothing_twice


def test_a_syncer_that_ends_in_a_merge_and_in_a_write_goes_on_from_the_last_commit(job):
    learners = [job.learner(m) for m in (0, 1)]
    committed = [0, 0, 0]
    ends = {"memory:4": 1, "merge:5": -signal.SIGKILL, "write:4": -signal.SIGKILL}
    for n, (affliction, code) in enumerate(ends.items()):
        syncer = job.syncer(*["--resume"] * bool(n), affliction=affliction)
        syncer.wait(LIMIT)
        assert syncer.returncode == code, syncer.communicate()
        own = [job.own_step(m) for m in (0, 1)]
        versions = job.durable()
        merged = int(affliction.partition(":")[2]) - 1  # the last one was not committed
        # The commit before may be under way at the kill, since it is made beside the next merge.
        assert sum(committed) + merged - 1 <= sum(versions) <= sum(committed) + merged
        assert all(now >= then for now, then in zip(versions, committed, strict=True))
        committed = versions
        on = lambda own=own: all(job.own_step(m) > own[m] + 10 for m in (0, 1))  # noqa: E731
        job.wait_for(on, "steps without a syncer", learners)
    left = {path.name for path in (job.workdir / "syncer").iterdir()}
    assert any(name.startswith(".fragment-") for name in left), "it was killed with a file half written"
    syncer = job.syncer("--resume")
    more = lambda: all(now > then for now, then in zip(job.durable(), committed, strict=True))  # noqa: E731
    job.wait_for(more, "a merge of each fragment", [syncer, *learners])
    both = lambda: any(r["learners"] == [0, 1] for r in job.rounds())  # noqa: E731
    job.wait_for(both, "a merge of both", [syncer, *learners])
    assert job.end(syncer)[0] == 143
    assert [job.left(process)[0] for process in learners] == [0, 0]
    assert_nothing_twice(job)
    assert_counted_once(job, (0, 1))
    made = {p: [r["version"] for r in job.rounds() if r["fragment"] == p] for p in range(3)}
    assert all(versions == sorted(versions) for versions in made.values())
    assert job.summary()["outer_steps"] == {str(p): versions[-1] for p, versions in made.items()}
