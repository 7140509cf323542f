"""A learner of two hosts of which one is killed goes on with the other, and grows as it comes back."""

import signal

import pytest

from tests.integration.hand import TRANSFORMER, assert_counted_once, assert_nothing_twice
from tests.integration.remote_runs import lines

ELASTIC = (
    *TRANSFORMER,
    "--config.mesh.fsdp=2",
    "--config.mesh.data=-1",
    "--config.train.batch_size=4",
    "--config.remote.hosts=(2, 1)",
    "--config.remote.min_hosts=1",
    "--config.remote.host_timeout=3.0",
    "--config.remote.donor_port=None",
)
DEVICES = "--xla_force_host_platform_device_count=2"  # of each process
RESTARTED = "--restarts=1"


class Hosts:
    """The processes of learner 0, each restarted as an engine does that keeps one on each machine."""

    def __init__(self, job, flags):
        self.job, self._flags = job, flags
        self.processes = [self._started(host) for host in (0, 1)]

    def _started(self, host, *more):
        return self.job.learner(0, "--processes=2", f"--process={host}", *more, XLA_FLAGS=self._flags)

    def restart(self, host):
        self.processes[host] = self._started(host, RESTARTED)

    def left(self, host):
        """Its exit code and what it said, once it has ended by itself."""
        return self.job.left(self.processes[host])


def sources(job):
    """Where learner 0 had its state from, each time."""
    return [r["inner_state"] for r in lines(job.workdir / "recoveries.jsonl") if r["learner"] == 0]


def stepping_again(job, starts, alive):
    """When learner 0 took its first step after it had started so many times, in unix seconds."""
    job.wait_for(lambda: len(sources(job)) == starts, f"start {starts} of learner 0", alive)
    since = lines(job.workdir / "recoveries.jsonl")[-1]["time"]
    later = lambda: [step["time"] for step in job.steps(0) if step["time"] > since]  # noqa: E731
    job.wait_for(lambda: len(later()) > 5, f"steps after start {starts}", alive)
    return later()[0]


@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_learner_goes_on_with_the_host_that_is_left_and_grows_as_the_other_comes_back(
    programs, new_job, killed
):
    job, flags = new_job(ELASTIC), f"{programs.environment['XLA_FLAGS']} {DEVICES}"
    syncer, other = job.syncer(), job.learner(1, XLA_FLAGS=flags)
    hosts, left = Hosts(job, flags), 1 - killed
    everyone = [syncer, other, *hosts.processes]
    job.wait_for(lambda: len(job.steps(0)) > 5 and job.own_step(0) > 0, "steps and a checkpoint", everyone)

    hosts.processes[killed].send_signal(signal.SIGKILL)
    code, _, err = hosts.left(left)
    assert code == 1, err
    beside = len(job.steps(1))
    hosts.restart(left)
    alone = stepping_again(job, 2, [other, syncer])
    assert len(job.steps(1)) > beside
    job.wait_for(lambda: job.merges(0, alone), "a merge of one host's work", [other, syncer])

    hosts.restart(killed)
    code, _, err = hosts.left(left)
    assert code == 143, err
    hosts.restart(left)
    together = stepping_again(job, 3, [other, syncer, hosts.processes[killed]])
    job.wait_for(lambda: job.merges(0, together), "a merge of both hosts' work", [other, syncer])
    assert job.end(syncer)[0] == 143
    assert sources(job) == ["fresh", "checkpoint", "checkpoint"]
    assert min(line["tokens"] for line in job.steps(0)) > 120, "every step has the rows of both hosts"
    assert_counted_once(job, [0, 1])
    assert_nothing_twice(job)
