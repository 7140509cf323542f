"""Whether a run's folder is still its own: another run may have its path by now."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib

LOCK = ".lock"  # the process that has locked this file of a run's folder owns it


class Owner:
    """Remembers that the folder is now that of the run which makes this.

    A path can come to lead elsewhere while a run goes on: its folder is moved and another run begins in its
    place, or its lock is removed and another process takes the folder.
    """

    def __init__(self, workdir: pathlib.Path) -> None:
        self._lock = workdir / LOCK
        self._own = self._found()

    def check(self) -> None:
        """Raises OSError if another run has the folder now."""
        if self._own is not None and self._found() not in (None, self._own) and is_locked(self._lock):
            raise OSError(errno.ESTALE, "another run has taken the folder")

    def _found(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            found = os.stat(self._lock)
            return found.st_dev, found.st_ino
        return None


def take(file: int) -> bool:
    """Locks an open file (flock) until it is closed; False: a process has it locked. Raises OSError."""
    while not _locked(file, fcntl.LOCK_EX):
        if not _locked(file, fcntl.LOCK_SH):
            return False
        # Somebody only looks whether it is locked, which takes an instant.
    return True


def is_locked(path: pathlib.Path) -> bool | None:
    """Whether a process has locked the file; None: there is no such file."""
    with contextlib.suppress(FileNotFoundError), path.open() as file:
        return not _locked(file.fileno(), fcntl.LOCK_SH)
    return None


def _locked(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
