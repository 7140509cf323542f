"""Programs that start without their imports: forked from a process that has made them all.

Imports are most of the processor time of a short program. The process begins with the first program, and ends
with the one that tests. A program that starts others, as the launcher does, has a fork server that was
forked too.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pathlib
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import util

from ddiloco.launch import processes

WHERE = signal.SIGUSR1  # by which a program says where its threads are
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload([processes.PRELOADED[0], "tests.imports"])


class Program:
    """A running `python -m MODULE`, with what tests need of `subprocess.Popen`; its output goes to files."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        cwd: pathlib.Path,
    ) -> None:
        self.args = [module, *arguments]
        self._files = [tempfile.NamedTemporaryFile(prefix="ddiloco-test-") for _ in range(2)]  # noqa: SIM115
        told = (module, list(arguments), dict(environment), str(cwd), [file.name for file in self._files])
        self._process = _forks.Process(target=_be, args=told)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the number of the signal that killed it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended; raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it said on its standard output and error; raises subprocess.TimeoutExpired."""
        self.wait(timeout)
        return self.said(), pathlib.Path(self._files[1].name).read_text()

    def said(self) -> str:
        """What it has said so far on its standard output."""
        return pathlib.Path(self._files[0].name).read_text()

    def send_signal(self, number: int) -> None:
        """Sends it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _be(module: str, arguments: list[str], environment: dict[str, str], cwd: str, output: list[str]) -> None:
    """In the forked process: is the program, to its end."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for fd, path in enumerate(output, start=1):
        with open(path, "w") as file:
            os.dup2(file.fileno(), fd)
    faulthandler.register(WHERE)
    sys.argv[1:] = arguments
    _keep_a_fork_server()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = _code(end.code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    # As Python itself ends, so that what hangs there is seen; but for its modules, whose end takes a while.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _keep_a_fork_server() -> None:
    """Leaves a copy of this process as it is now, for the program's own fork server to begin in.

    `multiprocessing` begins one as `python -c "... main(listener, alive, ...)"`, with two descriptors.
    """
    ours, theirs = socket.socketpair()
    copy = os.fork()
    if not copy:
        ours.close()
        signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        )  # as `warm_up` does
        command, descriptors, _, _ = socket.recv_fds(theirs, 1 << 16, 2)
        if command:
            exec(re.sub(r"main\(\d+, \d+", "main({}, {}".format(*descriptors), command.decode()))
        os._exit(0)
    theirs.close()
    begin = util.spawnv_passfds

    def spawn(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in arguments[-1] or ours.fileno() < 0:
            return begin(path, arguments, descriptors)
        with ours:
            socket.send_fds(ours, [arguments[-1].encode()], descriptors)
        return copy

    util.spawnv_passfds = spawn


def _code(given: object) -> int:
    if given is None or isinstance(given, int):
        return given or 0
    print(given, file=sys.stderr)
    return 1
