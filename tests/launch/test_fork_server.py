"""The fork server: what it starts is as if started by itself, and falls to whoever asked."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from ddiloco.launch.fork_server import Child, ForkError, ForkServer
from ddiloco.launch.starter import Starter
from ddiloco.launch.supervisor import Role, Supervisor
from ddiloco.settings.remote import RemoteConfig
from tests.remote.ends import alive, until

TELLS = """
    import json, os, sys
    told = {
        "name": __name__, "arguments": sys.argv[1:], "environment": dict(os.environ),
        "input": sys.stdin.readline(), "session": os.getsid(0) == os.getpid(), "jax": "jax" in sys.modules,
        "parent": os.getppid(), "fd": os.read(int(sys.argv[1]), 3).decode(),
    }
    with open(sys.argv[2], "w") as file:
        json.dump(told, file)
    sys.exit(7)
"""
COMPUTES = """
    import sys, jax
    with open(sys.argv[1], "w") as file:
        file.write(f"{jax.device_count()} {int(jax.jit(lambda x: x + 1)(41))}")
"""
WAITS = "import signal; signal.pause()"
SPEAKS = "print('here I am')"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A PYTHONPATH with the modules above."""
    folder = tmp_path_factory.mktemp("modules")
    for name, text in {"tells": TELLS, "computes": COMPUTES, "waits": WAITS, "speaks": SPEAKS}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


@pytest.fixture(scope="module")
def forks(path):
    """A server whose children find the modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        server = ForkServer()
    yield server
    server.stop()


@pytest.fixture
def pipe():
    """A readable file descriptor with three bytes to read."""
    reading, writing = os.pipe()
    os.write(writing, b"abc")
    yield reading
    os.close(reading)
    os.close(writing)


def module(name, *arguments):
    return [sys.executable, "-m", name, *map(str, arguments)]


def test_a_forked_program_has_its_own_arguments_environment_input_and_descriptor(forks, pipe, tmp_path):
    told = tmp_path / "told"
    child = forks.start(module("tells", pipe, told), {"ONLY": "this"}, fd=pipe, piped=True)
    child.stdin.write(b"a line\n")
    child.stdin.close()
    assert child.wait(60) == child.poll() == 7
    assert json.loads(told.read_text()) == {
        "name": "__main__",
        "arguments": [str(pipe), str(told)],
        "environment": {"ONLY": "this"},
        "input": "a line\n",
        "session": True,
        "jax": True,
        "parent": os.getpid(),
        "fd": "abc",
    }


def test_a_forked_program_computes_on_as_many_devices_as_its_environment_says(forks, tmp_path):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=3", "JAX_PLATFORMS": "cpu"}
    child = forks.start(module("computes", tmp_path / "told"), {**os.environ, **flags})
    assert child.wait(60) == 0
    assert (tmp_path / "told").read_text() == "3 42"


def test_how_a_forked_program_ended_is_known(forks):
    child = forks.start(module("waits"), dict(os.environ))
    assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    child.kill()
    assert child.wait(60) == -signal.SIGKILL
    child.terminate()  # there is nobody to hear it, nor anybody else who has its number by now
    absent = forks.start(module("there_is_none"), dict(os.environ))
    assert absent.wait(60) == 1


def test_one_thread_may_end_what_another_waits_for(forks):
    child = forks.start(module("waits"), dict(os.environ))
    codes = []
    waiting = threading.Thread(target=lambda: codes.append(child.wait(60)))
    waiting.start()
    child.terminate()
    waiting.join(60)
    assert codes == [-signal.SIGTERM]


@pytest.mark.parametrize("forked", [True, False])
def test_only_a_quiet_program_is_not_heard(path, forked, capfd):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        starter = Starter(ForkServer() if forked else None, print)
    for quiet in (True, False):
        child = starter.start(module("speaks"), {**os.environ, "PYTHONPATH": path}, quiet=quiet)
        assert child.wait(60) == 0
        assert capfd.readouterr().out == ("" if quiet else "here I am\n")
        assert isinstance(child, Child) == forked
    starter.stop()


def test_other_commands_are_not_forked(forks):
    with pytest.raises(ForkError, match="true is not forked"):
        forks.start(["true"], {})


def test_a_server_ends_with_its_owner_and_what_it_forked_does_not(path):
    owner = textwrap.dedent(f"""
        import os, signal
        from ddiloco.launch.fork_server import ForkServer
        server = ForkServer()
        child = server.start({module("waits")!r}, dict(os.environ))
        print(server._process.pid, child.pid, flush=True)
        signal.pause()
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", owner],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    server, child = map(int, process.stdout.readline().split())
    process.kill()
    process.wait()
    until(lambda: not alive(server), "the server's end")
    assert alive(child)
    os.kill(child, signal.SIGKILL)
    process.stdout.close()


def test_a_supervisor_without_its_server_says_so_and_starts_processes_all_the_same(monkeypatch):
    server = ForkServer()
    os.kill(server._process.pid, signal.SIGKILL)
    told = []
    role = Role("the syncer", module("http"), dict(os.environ))  # a package without a program: it fails
    supervisor = Supervisor(
        role, [], RemoteConfig(restarts=0), told.append, starter=Starter(server, told.append)
    )
    assert supervisor.run(threading.Event()) == 1
    assert [line.partition(": the fork")[0] for line in told] == ["processes start slower from now on"]
