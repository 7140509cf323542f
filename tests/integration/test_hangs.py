"""Processes that hang and go on, an old process that meets its successor, and a liar among the learners."""

import itertools
import threading
import time

from experiments.studies.chaos.impersonation import BROKEN, CLAIMS, Impersonator
from tests.integration.hand import SECURITY, assert_counted_once, assert_nothing_twice, go_on, stop

CHANGES = ("--config.sync.num_learners=3", "--config.train.min_step_seconds=(0.05, 0.05, 0.05)")
LIES = [
    *({"poison": name} for name in ("not finite", "infinite")),
    *({"claim": name} for name in CLAIMS if CLAIMS[name]),
    *({"broken": name} for name in BROKEN),
]
AGAIN = (
    {"poison": "not finite"},
    *({"claim": name} for name in ("an older version", "no work", "another fragment", "another size")),
    *({"broken": name} for name in ("silence", "cut short", "too long", "a chunk too long")),
)
REFUSED = ("fragment of another size", "fragment cut short", "chunk of another size", "another fragment")


def hang_of_a_learner(job, learner, alive):
    """The other's merges go on; as it goes on it is merged again, and is the same process."""
    stop(learner)
    stopped = time.time()
    alone = lambda: [r for r in job.rounds(stopped) if r["learners"] == [0]]  # noqa: E731
    job.wait_for(lambda: len(alone()) > 6, "merges without the one that hangs", alive)
    go_on(learner)
    back = time.time()
    job.wait_for(lambda: len(job.merges(1, back)) > 2, "merges with the one that hung", [*alive, learner])


def hang_of_the_syncer(job, syncer, learners):
    """The learners step on: their own copies of their state tell it. Merges go on after."""
    stop(syncer)
    before = {m: job.own_step(m) for m in (0, 1)}
    on = lambda: all(job.own_step(m) > before[m] + 10 for m in (0, 1))  # noqa: E731
    job.wait_for(on, "steps without the syncer", learners)
    go_on(syncer)
    back = time.time()
    job.wait_for(lambda: job.merges(0, back) and job.merges(1, back), "merges of both", [syncer, *learners])


def successor_of_one_that_lingers(job, old, alive):
    """The new process works; the old one is refused as it goes on, and ends. Returns the new one."""
    stop(old)
    known = time.time_ns() // 1000  # no less than the incarnations of all processes before
    new = job.learner(1)
    job.wait_for(lambda: any(c[1] > known for _, c in job.merges(1)), "a merge of the new", [*alive, new])
    taken_over = time.time()
    go_on(old)
    job.wait_for(lambda: old.poll() is not None, "the end of the old process", [*alive, new])
    code, _, err = job.end(old)
    assert code == 1
    assert "the syncer refused learner 1" in err
    ended = time.time()
    job.wait_for(lambda: len(job.merges(1, ended)) > 2, "merges of the new", [*alive, new])
    assert all(c[1] > known for _, c in job.merges(1, taken_over)), "nothing of the old one is merged"
    return new


class InTurn(Impersonator):
    """Answers each question with the next of LIES, and then in turn with a sound offer and with one of AGAIN.

    A sound one is sent twice. What comes once the merge has begun is told as late, whatever is wrong with it,
    and has to be sent again to be told for what it is.
    """

    def __init__(self, job):
        self.deeds = []
        super().__init__(job.address, job.terms(), 2, SECURITY, tokens=1, count=self.deeds.append)
        self._lies = itertools.chain(LIES, itertools.cycle((None, *AGAIN)))

    def _answer(self, which):
        lie = next(self._lies)
        if lie is None:
            self._push("sound", self._offer(which))
            self._push("replayed", self._offer(which))
        else:
            (name,) = lie.values()
            self._push(name, self._offer(which, **lie))

    @property
    def done(self):
        """Whether all of LIES have been sent, a replay was refused, and an offer ended that never came.

        A replay is taken where the syncer has asked for the same round again meanwhile.
        """
        sent = {deed.rpartition(": ")[0] for deed in self.deeds}
        ended = {"replayed: NOT_FOUND", "silence: CANCELLED"}
        return ended.issubset(self.deeds) and all(sent.issuperset(lie.values()) for lie in LIES)


def liar(job, alive):
    """All that it sends is refused or worth nothing, once; the run goes on."""
    impostor = InTurn(job)
    threading.Thread(target=impostor.run, args=(threading.Event(),), daemon=True).start()

    def told():
        drops = job.summary()["drops"]
        refused = {"wire: unawaited fragment", *(f"wire: {reason}" for reason in REFUSED)} <= drops.keys()
        stale = drops.get("stale fragment", 0) >= 2
        return refused and stale and any("finite" in reason for reason in drops)

    job.wait_for(lambda: impostor.done and told(), "all that it has to send, told for what it is", alive)
    impostor.leave()
    over = time.time()
    job.wait_for(lambda: job.merges(0, over) and job.merges(1, over), "merges of the honest", alive)


def test_hangs_a_successor_and_a_liar_stop_nobody_and_change_nothing_that_was_committed(job):
    syncer, one, two = job.syncer(), job.learner(0), job.learner(1)
    job.wait_for(lambda: job.merges(0) and job.merges(1), "merges of both", [syncer, one, two])
    hang_of_a_learner(job, two, [syncer, one])
    hang_of_the_syncer(job, syncer, [one, two])
    new = successor_of_one_that_lingers(job, two, [syncer, one])
    liar(job, [syncer, one, new])
    assert job.end(syncer)[0] == 143
    assert [job.left(process)[0] for process in (one, new)] == [0, 0]
    assert_nothing_twice(job)
    assert_counted_once(job, (0, 1))
    summary = job.summary()
    assert (summary["uptime"], summary["failures"]) == (1.0, [])
    drops = summary["drops"]
    assert {"wire: unawaited fragment", *(f"wire: {reason}" for reason in REFUSED)} <= drops.keys()
    versions = {r["fragment"]: r["version"] for r in job.rounds()}
    for p, version in enumerate(job.durable()):
        assert version - versions[p] in (0, 1), (
            "durable is what was committed, and what was as the order to stop came"
        )
