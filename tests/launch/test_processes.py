"""Processes forked from a warm one: each is as if started by itself, and ends with whoever started it."""

import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

from ddiloco.launch import processes
from tests.remote.ends import alive, until

TELLS = """
    import json, os, sys
    told = {
        "name": __name__, "arguments": sys.argv[1:], "environment": dict(os.environ),
        "input": sys.stdin.readline(), "session": os.getsid(0) == os.getpid(), "jax": "jax" in sys.modules,
        "tests": "pytest" in sys.modules, "folder": os.getcwd(),
    }
    with open(sys.argv[1], "w") as file:
        json.dump(told, file)
    sys.exit(7)
"""
COMPUTES = """
    import sys, jax
    from jax._src import xla_bridge
    begun = xla_bridge.backends_are_initialized()
    with open(sys.argv[1], "w") as file:
        file.write(f"{begun} {jax.device_count()} {jax.config.jax_enable_x64} {jax.config.jax_platforms}")
"""
WAITS = "import signal; signal.pause()"
SPEAKS = "print('here I am')"


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """The modules above can be imported."""
    for name, text in {"tells": TELLS, "computes": COMPUTES, "waits": WAITS, "speaks": SPEAKS}.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)


def ended(process):
    """The exit code, once there is one."""
    process.join(60)
    return process.exitcode


def test_a_program_has_its_own_arguments_environment_input_and_session(tmp_path):
    told = tmp_path / "told"
    reading, writing = multiprocessing.Pipe(duplex=False)
    process = processes.start("tells", [str(told), "more"], {"ONLY": "this"}, stdin=reading)
    os.write(writing.fileno(), b"a line\n")
    assert ended(process) == 7
    assert json.loads(told.read_text()) == {
        "name": "__main__",
        "arguments": [str(told), "more"],
        "environment": {"ONLY": "this"},
        "input": "a line\n",
        "session": True,
        "jax": True,
        "tests": False,
        "folder": os.getcwd(),
    }


@pytest.mark.parametrize(("devices", "wide"), [(3, True), (2, False)])
def test_jax_is_as_the_environment_of_each_program_says(tmp_path, devices, wide):
    own = {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu,cpu" if wide else "cpu",
        "JAX_ENABLE_X64": str(int(wide)),
    }
    process = processes.start("computes", [str(tmp_path / "told")], {**os.environ, **own})
    assert ended(process) == 0
    assert (tmp_path / "told").read_text() == f"False {devices} {wide} {own['JAX_PLATFORMS']}"


def test_how_a_program_ended_is_known():
    killed = processes.start("waits", [], os.environ)
    assert killed.exitcode is None
    killed.kill()
    assert ended(killed) == -signal.SIGKILL
    asked = processes.start("waits", [], os.environ)
    asked.terminate()
    assert ended(asked) == -signal.SIGTERM
    assert ended(processes.start("there_is_none", [], os.environ)) == 1


def test_only_a_quiet_program_is_heard_by_nobody(tmp_path):
    program = textwrap.dedent("""
        import os
        from ddiloco.launch import processes
        for quiet in (True, False):
            process = processes.start("speaks", [], os.environ, quiet=quiet)
            process.join()
            print(quiet, process.exitcode, flush=True)
    """)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["True 0", "here I am", "False 0"]


def test_programs_end_with_who_started_them_however_that_ends(tmp_path):
    owner = textwrap.dedent("""
        import os, signal
        from multiprocessing import forkserver
        from ddiloco.launch import processes
        children = [processes.start("waits", [], os.environ) for _ in range(2)]
        print(forkserver._forkserver._forkserver_pid, *(child.pid for child in children), flush=True)
        signal.pause()
    """)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", owner],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        numbers = [int(number) for number in process.stdout.readline().split()]
        assert all(map(alive, numbers))
        process.kill()
    until(lambda: not any(map(alive, numbers)), "the ends of the server and its programs")


def test_a_lost_server_takes_its_programs_along_and_another_is_started():
    process = processes.start("waits", [], os.environ)
    server = int(pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(server, signal.SIGKILL)
    until(lambda: not alive(process.pid), "the program's end")
    assert ended(process) != 0
    assert ended(processes.start("speaks", [], os.environ, quiet=True)) == 0
