"""A learner with valid credentials and honest counts that sends outer gradients a million times too long."""

import math
import threading
import time

import numpy as np

from ddiloco.storage import array_file
from experiments.studies.chaos.impersonation import Impersonator
from tests.integration.hand import SECURITY, TRANSFORMER

CHANGES = (  # a transformer, to whose gradients the guard is tuned
    *TRANSFORMER,
    "--config.sync.num_learners=3",
    "--config.train.min_step_seconds=(0.05, 0.05, 0.05)",
)
LIAR = 2


class Hostile(Impersonator):
    """Answers every question with the fragment that it was given, and far too much added."""

    def _answer(self, which):
        self._push("far away", self._offer(which, poison="long noise"))


def test_what_a_hostile_learner_sends_is_left_out_and_it_ends_in_quarantine(job):
    alive = [job.syncer(), job.learner(0), job.learner(1)]
    merged = lambda: len(job.merges(0)) > 3 and len(job.merges(1)) > 3  # noqa: E731
    written = lambda: merged() and (job.workdir / "summary.json").exists()  # noqa: E731
    job.wait_for(written, "merges of both", alive)
    honest = max(line["outer_gradient_norm"] for line in job.rounds())
    hostile = Hostile(job.address, job.terms(), LIAR, SECURITY, tokens=2, count=print)
    threading.Thread(target=hostile.run, args=(threading.Event(),), daemon=True).start()
    refused = lambda: job.summary()["offers_left_out"].get(str(LIAR), 0)  # noqa: E731
    job.wait_for(lambda: refused() >= 6, "offers of the hostile one that are left out", alive)
    quarantined = time.time()
    job.wait_for(
        lambda: job.merges(0, quarantined) and job.merges(1, quarantined), "merges of the honest", alive
    )
    hostile.leave()
    assert job.end(alive[0])[0] == 143
    assert [job.left(process)[0] for process in alive[1:]] == [0, 0]
    summary = job.summary()
    assert summary["quarantined"] == [LIAR]
    assert summary["offers_left_out"].keys() == {str(LIAR)}
    assert any(f"learner {LIAR} is in quarantine" in alarm for alarm in summary["alarms"])
    assert all(line["learners"] and LIAR not in line["learners"] for line in job.rounds())
    assert max(line.get("outer_gradient_norm", 0.0) for line in job.rounds()) < 1e3 * honest
    for path in (job.workdir / "syncer").glob("fragment-*"):
        header, arrays = array_file.load(path, b"ddiloco fragment 1\n")
        longest = max(float(np.abs(x).max(initial=0.0)) for x in arrays[: header["pieces"]])
        assert math.isfinite(longest) and longest < 100
