"""Processes forked from a warm one: each is as if started by itself, and ends with whoever started it."""

import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import textwrap

import pytest

from ddiloco.launch import processes
from tests.remote.ends import alive, until

MODULES = {
    "tells": """
    import json, os, sys
    told = {
        "name": __name__, "arguments": sys.argv[1:], "environment": dict(os.environ),
        "input": sys.stdin.readline(), "session": os.getsid(0) == os.getpid(), "jax": "jax" in sys.modules,
        "tests": "pytest" in sys.modules, "folder": os.getcwd(),
    }
    with open(sys.argv[1], "w") as file:
        json.dump(told, file)
    sys.exit(7)
""",
    "computes": """
    import sys, jax
    from jax._src import xla_bridge
    begun = xla_bridge.backends_are_initialized()
    with open(sys.argv[1], "w") as file:
        file.write(f"{begun} {jax.device_count()} {jax.config.jax_enable_x64} {jax.config.jax_platforms}")
""",
    "allocates": """
    import ctypes, re, sys, threading
    from ddiloco.training import platform
    platform.prepare(cache=False)
    libc = ctypes.CDLL("libc.so.6")
    libc.malloc.restype = ctypes.c_void_p
    together = threading.Barrier(8)
    def allocate():
        together.wait()
        libc.malloc(100_000)
    threads = [threading.Thread(target=allocate) for _ in range(8)]
    [t.start() for t in threads], [t.join() for t in threads]
    libc.fopen.restype = ctypes.c_void_p
    file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
    libc.malloc_info(0, file), libc.fclose(file)
""",
    "starts_threads": """
    import ctypes, threading
    libc = ctypes.CDLL("libc.so.6")
    together = threading.Barrier(8)
    def allocate():
        together.wait()
        libc.malloc(100_000)
    threads = [threading.Thread(target=allocate) for _ in range(8)]
    [t.start() for t in threads], [t.join() for t in threads]
""",
    "forks": """
    import os, sys
    from ddiloco.launch import processes
    if sys.argv[2:]:
        processes.PRELOADED = (processes.PRELOADED[0], *sys.argv[2:])
    if __name__ == "__main__":
        process = processes.start("allocates", sys.argv[1:2], os.environ)
        process.join()
        sys.exit(process.exitcode)
""",
    "makes_way": """
    import os, pathlib, sys, threading
    from ddiloco.launch import processes
    threading.Thread(target=sys.stdin.readline, daemon=True).start()
    processes.make_way()
    nice = {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task")}
    group = pathlib.Path("/proc/self/autogroup")
    with open(sys.argv[1], "w") as file:
        file.write(f"{nice} {group.read_text().split()[-1] if group.exists() else processes.NICENESS}")
""",
    "waits": """
    import signal
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal.pause()
""",
    "speaks": "print('here I am')",
}


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """The modules above can be imported."""
    for name, text in MODULES.items():
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have no arenas")
@pytest.mark.parametrize(
    "imported", [pytest.param([], id="quiet", marks=pytest.mark.slow), ["starts_threads"]]
)
def test_all_threads_of_a_program_allocate_in_one_arena(tmp_path, imported):
    # Of a caller of its own: the fork server of the tests imports what they need.
    told, path = tmp_path / "told", os.pathsep.join([str(tmp_path), os.getcwd()])
    command = [sys.executable, "-m", "forks", str(told), *imported]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, timeout=120, check=True)
    assert told.read_text().count("<heap ") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems lower no priority")
def test_a_program_that_makes_way_does_so_with_all_its_threads_and_alone(tmp_path):
    before = os.getpriority(os.PRIO_PROCESS, 0)
    reading, _writing = multiprocessing.Pipe(duplex=False)
    assert ended(processes.start("makes_way", [str(tmp_path / "told")], os.environ, stdin=reading)) == 0
    assert (tmp_path / "told").read_text() == f"{{{processes.NICENESS}}} {processes.NICENESS}"
    processes.make_way()  # not a program that `start` began
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_how_a_program_ended_is_known():
    killed = processes.start("waits", [], os.environ)
    assert killed.exitcode is None
    killed.kill()
    assert ended(killed) == -signal.SIGKILL
    asked = processes.start("waits", [], os.environ)
    asked.terminate()
    assert ended(asked) == -signal.SIGTERM
    assert ended(processes.start("there_is_none", [], os.environ)) == 1


PARENT = """
    import os, pathlib, signal, sys
    from ddiloco.launch import processes
    processes.PRELOADED = processes.PRELOADED[:1]  # no other import matters here

    def server_of(child):
        return int(pathlib.Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[1])
"""


@pytest.fixture
def parent(tmp_path):
    """Starts Python with lines that begin as PARENT; it has a fork server of its own."""
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    def run(lines):
        program = textwrap.dedent(PARENT) + textwrap.dedent(lines)
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
        )

    return run


def test_only_a_quiet_program_is_heard_by_nobody(parent):
    process = parent("""
        for quiet in (True, False):
            child = processes.start("speaks", [], os.environ, quiet=quiet)
            child.join()
            print(quiet, child.exitcode, flush=True)
    """)
    assert process.communicate(timeout=60)[0].splitlines() == ["True 0", "here I am", "False 0"]


def test_programs_end_with_who_started_them_however_that_ends(parent):
    with parent("""
        children = [processes.start("waits", [], os.environ) for _ in range(2)]
        print(server_of(children[0]), *(child.pid for child in children), flush=True)
        signal.pause()
    """) as process:
        numbers = [int(number) for number in process.stdout.readline().split()]
        assert all(map(alive, numbers))
        process.kill()
    until(lambda: not any(map(alive, numbers)), "the ends of the server and its programs")


def test_the_word_to_stop_may_go_to_the_first_server_too_which_outlives_its_programs(parent):
    process = parent("""
        first = processes.start("waits", [], os.environ)
        os.kill(server_of(first), signal.SIGTERM)
        second = processes.start("waits", [], os.environ)
        print(server_of(first) == server_of(second))
        first.kill(), second.kill()
    """)
    assert process.communicate(timeout=60)[0] == "True\n"


def test_a_lost_server_takes_its_programs_along_and_another_is_started(parent):
    process = parent("""
        child = processes.start("waits", [], os.environ)
        os.kill(server_of(child), signal.SIGKILL)
        child.join()
        print(child.pid, child.exitcode, flush=True)
        after = processes.start("speaks", [], os.environ, quiet=True)
        after.join()
        print(after.exitcode)
    """)
    (number, code), (after,) = map(str.split, process.communicate(timeout=60)[0].splitlines())
    assert code != "0" and after == "0"
    until(lambda: not alive(int(number)), "the program's end")
