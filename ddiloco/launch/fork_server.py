"""A process that has imported everything and forks others: their start costs no imports.

Imports are more than half of the processor time of a start. The server starts no thread and uses no device,
so that its children may. What it forks falls to the process that asked, which alone may wait for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

PRELOADED = (
    "ddiloco.data.preparation",
    "ddiloco.data.stdlib_text",
    "ddiloco.run.job",
    "ddiloco.virtual.without_arrays",
    "ddiloco.remote.learner.process",
    "ddiloco.remote.syncer.process",
    "matplotlib.backends.backend_agg",
    "ml_collections.config_flags",
    "tensorboardX",
    "tensorflow_datasets.core.data_sources.array_record",
)
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_LONGEST_REQUEST = 1 << 20  # bytes
_ANSWER_SECONDS = 60.0  # the first answer comes after the imports


class ForkError(Exception):
    """The server cannot fork (any more); the message is one line."""


class Child:
    """A process that the server forked, with what a supervisor needs of `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: IO[bytes] | None) -> None:
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None  # minus the signal that killed it
        self._one = threading.Lock()  # whoever waits for it reaps it, and nobody signals its number after

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        with self._one:
            return self._poll()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended; raises subprocess.TimeoutExpired."""
        with self._one:
            ended = os.pidfd_open(self.pid) if self._poll() is None else None
        if ended is not None:
            try:
                select.select([ended], [], [], timeout)
            finally:
                os.close(ended)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self.returncode

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with self._one:
            if self._poll() is None:  # once waited for, the number may be another process's
                os.kill(self.pid, number)

    def _poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkServer:
    """The asking end, for one thread at a time. The server ends with it."""

    def __init__(self) -> None:
        """Starts the server, which imports while the caller goes on.

        Raises:
          ForkError: this system cannot hand a grandchild over.
        """
        try:
            taken_in = ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0) == 0
        except (OSError, AttributeError):
            taken_in = False
        if not taken_in:
            raise ForkError("this system has no subreapers")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_ANSWER_SECONDS)
        with theirs:
            command = [sys.executable, "-m", "ddiloco.launch.fork_server", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True
            )

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        fd: int | None = None,
        piped: bool = False,
        quiet: bool = False,
    ) -> Child:
        """Has a command run, `python -m MODULE` of this interpreter and its arguments.

        Args:
          command: as for a process of its own.
          environment: all of it.
          fd: a file descriptor that it keeps, under the same number, if any.
          piped: whether its standard input is a pipe, `Child.stdin`, or empty.
          quiet: whether its standard output goes nowhere, or where that of the server goes.

        Raises:
          ForkError: the command is another, or the server is gone or does not answer.
        """
        if not forkable(command):
            raise ForkError(f"{command[0]} is not forked")
        told = {"module": command[2], "arguments": list(command[3:]), "fd": fd, "quiet": quiet}
        request = json.dumps({**told, "environment": dict(environment)}).encode()
        theirs, ours = os.pipe() if piped else (os.open(os.devnull, os.O_RDONLY), None)
        try:
            socket.send_fds(self._socket, [request], [theirs] if fd is None else [theirs, fd])
            answer = self._socket.recv(_LONGEST_REQUEST)
            if not answer:
                raise OSError("it has ended")
        except OSError as error:
            if ours is not None:
                os.close(ours)
            raise ForkError(f"the fork server cannot be asked: {error}") from None
        finally:
            os.close(theirs)
        return Child(json.loads(answer)["pid"], None if ours is None else io.FileIO(ours, "w"))

    def stop(self) -> None:
        """Ends the server; what it has forked goes on."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def forkable(command: Sequence[str]) -> bool:
    """Whether a command is one that a server can start."""
    return list(command[:2]) == [sys.executable, "-m"]


def serve(requests: socket.socket) -> dict[str, Any]:
    """Forks a process for each request, until the other end is closed.

    Returns:
      The request, in the forked process, which is to carry it out.

    Raises:
      EOFError: the other end is closed.
    """
    while True:
        message, fds, _, _ = socket.recv_fds(requests, _LONGEST_REQUEST, 2)
        if not message:
            raise EOFError
        request = json.loads(message)
        pid = _fork_apart()
        if pid == 0:
            requests.close()
            _take_on(request, *fds)
            return request
        for fd in fds:
            os.close(fd)
        requests.send(json.dumps({"pid": pid}).encode())


def _fork_apart() -> int:
    """As os.fork, of a process whose parent ends at once, so that it falls to the subreaper."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            os.close(writing)
            return 0
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        pid = int(told.read())
    os.waitpid(between, 0)
    return pid


def _take_on(request: Mapping[str, Any], stdin: int, kept: int | None = None) -> None:
    """Makes the forked process what it would be, had it been started by itself."""
    os.setsid()  # a Ctrl-C is for who asked, which passes it on in order
    os.dup2(stdin, 0)
    os.close(stdin)
    if kept is not None and kept != request["fd"]:
        os.dup2(kept, request["fd"])
        os.close(kept)
    if request["quiet"]:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[1:] = request["arguments"]


def main() -> None:
    """The server's program; its argument is the number of its socket."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        with contextlib.suppress(ImportError):  # whoever needs it says so
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else the first collection of each child would copy these pages
    try:
        request = serve(requests)
    except EOFError:
        return
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
