"""Wall clocks that jump by an hour, or are a month off: no decision changes, what is told stays sane."""

import signal

import pytest

from tests.integration.hand import assert_counted_once, assert_nothing_twice


def test_clocks_that_jump_by_an_hour_change_no_decision_and_no_count(job):
    syncer = job.syncer(affliction=f"clock:{-30 * 24 * 3600}")  # which believes its learners all the same
    one, two = job.learner(0, affliction="clock"), job.learner(1)
    alive = [syncer, one, two]

    def merged_on():
        """Merges of both after all that there are now."""
        known = len(job.rounds())
        later = lambda: {m for r in job.rounds()[known:] for m in r["learners"]}  # noqa: E731
        job.wait_for(lambda: later() == {0, 1}, "merges of both", alive)

    merged_on()
    for process, jump in (
        (one, signal.SIGUSR1),
        (syncer, signal.SIGUSR2),
        (one, signal.SIGUSR2),
        (one, signal.SIGUSR2),
        (syncer, signal.SIGUSR1),
        (syncer, signal.SIGUSR1),
    ):
        process.send_signal(jump)
        merged_on()
    known = len(job.steps(1))
    two.kill()
    two.wait()
    incarnation = max(c[1] for _, c in job.merges(1))
    two = job.learner(1, affliction="clock:-7200")  # begins before the process whose place it takes
    alive[2] = two
    later = lambda: any(c[1] > incarnation for _, c in job.merges(1))  # noqa: E731
    job.wait_for(later, "a merge of the one that began earlier", alive)
    job.wait_for(lambda: len(job.steps(1)) > known + 20, "the records of its steps", alive)
    assert job.end(syncer)[0] == 143
    assert [job.left(process)[0] for process in (one, two)] == [0, 0]
    assert_nothing_twice(job)
    assert_counted_once(job, (0, 1))
    summary = job.summary()
    assert summary["failures"] == []
    refused = {reason for reason in summary["drops"] if reason.startswith("wire: ")}
    # On a slow machine an offer is asked for twice, and one was killed, perhaps in an offer.
    assert refused <= {"wire: unawaited fragment", "wire: fragment cut short"}
    shares = [summary["goodput"], summary["uptime"], *summary["lost"].values()]
    assert all(0 <= share <= 1 for share in shares)
    assert summary["goodput"] + sum(summary["lost"].values()) == pytest.approx(1)
    counted = {
        name: value for name, value in summary.items() if "seconds" in name and not isinstance(value, dict)
    }
    negative = {name: value for name, value in counted.items() if value is not None and value < 0}
    assert not negative
    assert all(r[name] >= 0 for r in job.rounds() for name in r if name.endswith("_seconds"))
