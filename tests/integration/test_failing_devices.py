"""A learner whose devices hang, and one whose devices compute wrong: each has an exit code of its own."""

import re
import socket
import time

import pytest

from ddiloco.storage import starts
from tests.integration.hand import TRANSFORMER
from tests.integration.remote_runs import lines
from tests.integration.test_hosts import ALONE, HOSTS, two_hosts

CHANGES = (
    "--config.train.verify_every=2",
    "--config.remote.max_learners=3",
    "--config.train.min_step_seconds=(0.05, 0.05, 0.05)",
)


def alarms(job):
    return [line["alarm"] for line in lines(job.workdir / "events.jsonl") if line["event"] == "alarm"]


def test_a_hung_step_and_wrong_bits_end_their_learners_and_another_goes_on(job):
    syncer = job.syncer()
    hung = job.learner(0, "--config.train.hang_timeout=1", affliction="hang:8")
    code, _, err = job.left(hung)
    assert code == 124, err
    assert re.search(r"error: learner 0: a step hangs, for [0-9.]+ s; its stacks are in \S+stacks.txt", err)
    stacks = (job.workdir / "learners" / "0" / "stacks.txt").read_text()
    assert re.search(r"thread devices-0\n(.*\n)*.* in stepped\n", stacks)
    corrupt = job.learner(1, affliction="corrupt")
    code, _, err = job.left(corrupt)
    assert code == 3, err
    assert "error: learner 1: CorruptionError: 3 verified steps gave other bits" in err
    known = job.workdir / "starts" / "0.0"
    for _ in range(starts.MANY - 2):  # the first process of learner 0 has started there, too
        starts.record_start(known, time.time())
    again = job.learner(0)
    often = f"learner 0: started {starts.MANY} times in 30 minutes on node {socket.gethostname()}"
    job.wait_for(lambda: len(job.steps(0)) > 20 and often in alarms(job), "steps", [syncer, again])
    told = [line for line in lines(job.workdir / "events.jsonl") if line["event"] == "sdc"]
    assert [socket.gethostname() in line["devices"] for line in told] == [True] * 3
    dropped = [line["step"] for line in job.steps(1) if not line["tokens"]]
    assert dropped == [line["step"] for line in told][: len(dropped)] and len(dropped) > 1
    assert not any("not finite" in alarm for alarm in alarms(job))
    joined = job.learner(2)  # of a loop of the user's own, beyond the first two
    job.wait_for(lambda: job.merges(2), "a merge of the learner that has joined", [syncer, again])
    assert job.end(syncer)[0] == 143
    assert [job.left(process)[0] for process in (again, joined)] == [0, 0]


@pytest.mark.slow
def test_all_hosts_of_a_learner_drop_a_step_that_one_of_them_computes_wrong(programs, new_job):
    """Else their parameters would differ from then on."""
    job = new_job((*TRANSFORMER, *HOSTS, *ALONE, "--config.train.verify_every=2"))
    syncer, hosts = job.syncer(), two_hosts(programs, job, affliction="corrupt")
    (code, _, err), (other, _, told) = (job.left(process) for process in hosts)
    assert (code, other) == (3, 1), err + told
    assert "CorruptionError" in err and "CorruptionError" not in told
    assert [line["tokens"] > 0 for line in job.steps(0)] == [True, False, True, False, True]
    assert job.end(syncer)[0] == 143
