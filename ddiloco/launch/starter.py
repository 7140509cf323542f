"""Starts Python programs as processes of this machine: forked where that can be, else from nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence

from ddiloco.launch.fork_server import Child, ForkError, ForkServer, forkable


class Starter:
    """For one thread at a time. What it has started goes on when it is stopped."""

    def __init__(self, forks: ForkServer | None, tell: Callable[[str], None]) -> None:
        """`forks` becomes its own; None: nothing is forked. `tell` takes a line if the server is lost."""
        self._forks, self._tell = forks, tell

    @classmethod
    def warm(cls, tell: Callable[[str], None]) -> Starter:
        """With a fork server, which imports while the caller goes on, where the system can have one."""
        try:
            return cls(ForkServer(), tell)
        except ForkError:  # elsewhere than on Linux
            return cls(None, tell)

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        fd: int | None = None,
        piped: bool = False,
        quiet: bool = False,
    ) -> subprocess.Popen | Child:
        """Has a command run in a session of its own: a Ctrl-C is for the caller, which passes it on in order.

        The arguments are those of `ForkServer.start`, but that the command may be any.
        """
        if self._forks is not None and forkable(command):
            try:
                return self._forks.start(command, environment, fd=fd, piped=piped, quiet=quiet)
            except ForkError as error:
                self._tell(f"processes start slower from now on: {error}")
                self.stop()
        return subprocess.Popen(
            command,
            env=dict(environment),
            pass_fds=() if fd is None else (fd,),
            stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if quiet else None,
            start_new_session=True,
        )

    def stop(self) -> None:
        """Ends the server, if there is one; from then on programs start from nothing."""
        if self._forks is not None:
            self._forks.stop()
            self._forks = None
