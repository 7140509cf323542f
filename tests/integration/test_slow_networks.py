"""Bad networks for real: a learner cut off, or on a thin link, in a network namespace; a long, lossy link."""

import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time

import pytest

from tests.bad_network import BadNetwork, LinkShape
from tests.integration.hand import LIMIT, UNENDING, assert_counted_once, assert_nothing_twice
from tests.integration.small_loop import ROWS

LOSING_ALL = ("tbf", "rate", "8bit", "burst", "1", "limit", "1")  # no packet is as small
THIN = ("tbf", "rate", "1mbit", "burst", "5kb", "limit", "100kb")  # a fragment takes as long as three steps
SELDOM = (*UNENDING, "--config.sync.interval=24")


def told(*command):
    """Runs a command; an error that it ends with has what it said."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def hexadecimal(host):
    """An address as /proc/net/tcp has it."""
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}"


class Namespace:
    """A network namespace, tied to this one by a pair of virtual Ethernet devices."""

    def __init__(self):
        number = os.getpid() % 16000
        self.name = f"ddiloco{number}"
        self.near, self.far = f"dd{number}a", f"dd{number}b"
        subnet = f"198.18.{number // 64}.{number % 64 * 4}"  # of a range that is for tests of networks
        base, last = subnet.rsplit(".", 1)
        self.host, self.guest = f"{base}.{int(last) + 1}", f"{base}.{int(last) + 2}"
        self.enter = ("ip", "netns", "exec", self.name)

    def make(self):
        told("ip", "netns", "add", self.name)
        told("ip", "link", "add", self.near, "type", "veth", "peer", "name", self.far)
        told("ip", "link", "set", self.far, "netns", self.name)
        told("ip", "addr", "add", f"{self.host}/30", "dev", self.near)
        told("ip", "link", "set", self.near, "up")
        told(*self.enter, "ip", "addr", "add", f"{self.guest}/30", "dev", self.far)
        told(*self.enter, "ip", "link", "set", self.far, "up")
        told(*self.enter, "ip", "link", "set", "lo", "up")
        self.shape(*LOSING_ALL)
        self.heal()

    def shape(self, *discipline):
        """Gives both directions this queueing discipline."""
        told("tc", "qdisc", "replace", "dev", self.near, "root", *discipline)
        told(*self.enter, "tc", "qdisc", "replace", "dev", self.far, "root", *discipline)

    def heal(self):
        told("tc", "qdisc", "del", "dev", self.near, "root")
        told(*self.enter, "tc", "qdisc", "del", "dev", self.far, "root")

    def partition(self):
        """From now on no packet passes, in either direction, and no end is told so."""
        if shutil.which("iptables"):
            told("iptables", "-I", "INPUT", "-i", self.near, "-j", "DROP")
            told("iptables", "-I", "OUTPUT", "-o", self.near, "-j", "DROP")
        else:
            self.shape(*LOSING_ALL)

    def mend(self):
        """Ends a partition."""
        if shutil.which("iptables"):
            told("iptables", "-D", "INPUT", "-i", self.near, "-j", "DROP")
            told("iptables", "-D", "OUTPUT", "-o", self.near, "-j", "DROP")
        else:
            self.heal()

    def connected(self, address):
        """Whether the syncer at the address, here, has a connection from there."""
        here, there = f":{int(address.split(':')[1]):04X}", f"{hexadecimal(self.guest)}:"
        tables = [pathlib.Path("/proc/net", name).read_text() for name in ("tcp", "tcp6")]
        rows = [line.split() for table in tables for line in table.splitlines()]
        return any(row[1].endswith(here) and there in row[2] and row[3] == "01" for row in rows)

    def remove(self):
        for command in (("ip", "link", "del", self.near), ("ip", "netns", "del", self.name)):
            subprocess.run(command, capture_output=True)


@pytest.fixture
def namespace():
    made = Namespace()
    try:
        made.make()
    except OSError as error:
        made.remove()
        pytest.skip(f"network namespaces are not permitted here: {error}")
    yield made
    made.remove()


@pytest.mark.slow
def test_a_learner_cut_off_steps_on_and_returns_and_one_on_a_thin_link_still_contributes(namespace, new_job):
    job = new_job(SELDOM, host=namespace.host)
    syncer, near, far = job.syncer(), job.learner(0), job.learner(1, affliction=f"network:{namespace.name}")
    alive = [syncer, near, far]
    job.wait_for(lambda: job.merges(0) and job.merges(1), "merges of both", alive)

    assert namespace.connected(job.address)
    namespace.partition()
    cut = time.time()
    held = job.own_step(1)
    job.wait_for(lambda: not namespace.connected(job.address), "the end of the connection", alive)
    alone = time.time()
    job.wait_for(lambda: len(job.rounds(alone)) > 6, "merges of the one", alive)
    job.wait_for(lambda: job.own_step(1) > held + 20, "steps of the other", alive)
    namespace.mend()
    healed = time.time()
    assert not job.merges(1, alone)
    job.wait_for(lambda: job.merges(1, healed), "a merge of the one that was cut off", alive)
    meanwhile = lambda: [s for s in job.steps(1) if cut < s["time"] < healed]  # noqa: E731
    job.wait_for(lambda: len(meanwhile()) > 10, "the records of its steps meanwhile", alive)

    namespace.shape(*THIN)
    thin = time.time()
    job.wait_for(lambda: len(job.merges(1, thin)) > 3, "merges over the thin link", alive)
    slow = time.time()
    job.wait_for(lambda: len(job.merges(0, slow)) > 3, "merges of the other", alive)
    namespace.heal()

    assert job.end(syncer)[0] == 143
    ends = [job.left(process) for process in (near, far)]
    assert [code for code, _, _ in ends] == [0, 0]
    assert "no connection to the syncer" in ends[1][2]
    assert_nothing_twice(job)
    assert_counted_once(job, (0, 1))
    summary = job.summary()
    assert (summary["uptime"], summary["failures"]) == (1.0, [])
    assert summary["inner_states"]["fresh"] == 2, "no process was started again"


@pytest.mark.slow
def test_over_a_long_and_lossy_link_a_run_comes_to_its_end_with_all_tokens(new_job):
    steps = 60
    kept = [s for s in UNENDING if "train.steps" not in s and "quorum" not in s]
    settings = (*kept, f"--config.train.steps={steps}", "--config.sync.quorum=2")
    shape = LinkShape(latency=0.1, jitter=0.05, loss=0.02)
    job = new_job(settings)
    host, port = job.address.split(":")
    with BadNetwork((host, int(port)), shape) as proxy:
        through = "{}:{}".format(*proxy.address)
        syncer = job.syncer()
        learners = [job.learner(m, address=through) for m in (0, 1)]
        ended = [process.communicate(timeout=LIMIT)[1] for process in (syncer, *learners)]
        assert proxy.connections >= 2
    assert [process.returncode for process in (syncer, *learners)] == [0, 0, 0], ended
    summary = job.summary()
    assert summary["finished"]
    assert_nothing_twice(job)
    assert_counted_once(job, (0, 1))
    for learner in (0, 1):
        taken = job.steps(learner)
        assert taken[-1]["step"] == steps
        assert len({line["tokens"] for line in taken}) == 1 and taken[0]["tokens"] == ROWS
