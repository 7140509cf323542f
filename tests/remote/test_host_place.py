"""How one host of several joins the others, and how it ends where it fails alone."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from ddiloco.data.errors import DataError
from ddiloco.launch.ports import reserved_port
from ddiloco.remote.learner.hosts import HostPlace
from tests.integration.programs import ROOT
from tests.remote.ends import TIMEOUT
from tests.remote.host_ends import Leading


@pytest.mark.parametrize(("error", "code"), [(DataError("no network answers"), 2), (MemoryError("none"), 1)])
def test_a_host_that_fails_alone_waits_for_no_other_as_it_ends(error, code):
    """JAX has a process of a job that ends by itself wait for the others, which wait for it."""
    program = f"""
from ddiloco.data.errors import DataError
from ddiloco.remote.learner.hosts import HostPlace
place = HostPlace(1, 2, "nowhere:1")
try:
    with place.ending():
        raise {error!r}
finally:
    print("it goes on")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.endswith(f"error: host 1: {'' if code == 2 else 'MemoryError: '}{error}\n")


def test_a_host_has_all_gpus_of_its_node_and_finds_host_0_whatever_its_cluster_sets():
    """JAX takes a task of Slurm for one of as many as there are GPUs, and the web's proxy for its own.

    And XLA would have the hosts wait for host 0 to compile what it has in its cache: it knows the flag.
    """
    program = """
import os
import jax
from ddiloco.launch.ports import reserved_port
from ddiloco.remote.learner.hosts import HostPlace
with reserved_port() as port:
    HostPlace(0, 1, f"127.0.0.1:{port}").join()
jax.numpy.zeros(1).block_until_ready()
print(jax.config._read("jax_cuda_visible_devices"), os.environ["XLA_FLAGS"])
"""
    names = ("JOB_ID", "STEP_NODELIST", "NTASKS", "PROCID", "LOCALID")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **{f"SLURM_{name}": "0" for name in names}}
    environment |= {"http_proxy": "http://127.0.0.1:1", "no_proxy": ".example.org"}
    environment["XLA_FLAGS"] = "--xla_cpu_enable_fast_math=false"
    command, told = [sys.executable, "-c", program], {"capture_output": True, "text": True}
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=2 * TIMEOUT, **told)
    flags = "--xla_gpu_shard_autotuning=false --xla_cpu_enable_fast_math=false"
    assert (done.returncode, done.stdout) == (0, f"all {flags}\n"), done.stderr


def test_a_host_ends_once_another_has_been_silent_for_the_timeout_also_while_none_steps():
    """As while they compile, when nothing of ours looks: JAX alone would wait for 100 s."""
    program = """
import sys, threading
from ddiloco.remote.learner.hosts import HostPlace
HostPlace(int(sys.argv[1]), 2, sys.argv[2], timeout=3.0).join()
print("joined", flush=True)
threading.Event().wait()
"""
    told = {"cwd": ROOT, "env": {**os.environ, "JAX_PLATFORMS": "cpu"}, "text": True}
    told |= {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with reserved_port() as port:
        command = [sys.executable, "-c", program]
        hosts = [subprocess.Popen([*command, str(n), f"127.0.0.1:{port}"], **told) for n in (0, 1)]
        try:
            assert [host.stdout.readline() for host in hosts] == ["joined\n"] * 2
            hosts[1].send_signal(signal.SIGSTOP)
            assert hosts[0].wait(60.0) != 0
        finally:
            for host in hosts:
                host.kill()
                host.wait()


def test_what_a_host_is_refused_with_once_the_others_have_left_is_raised():
    with pytest.raises(DataError), HostPlace(0, 2, "nowhere:1").ending(lambda: True):
        raise DataError("no network answers")


def test_host_0_names_the_hosts_that_it_waits_for(monkeypatch):
    """One that hangs before it follows, as at a disk, would idle all others without a word."""
    monkeypatch.setattr("ddiloco.remote.learner.followers.NOTED_EVERY", 0.0)
    leading, stop, lines = Leading(3), threading.Event(), []
    leading.followers._orders[2] = None  # it is there

    def note(line):
        lines.append(line)
        stop.set()

    assert not leading.followers.gather(stop, note)
    assert lines == ["waits for its hosts to be ready: 1, 3 of 4"]
