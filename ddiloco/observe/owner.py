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


def is_locked(path: pathlib.Path) -> bool | None:
    """Whether a process has the file locked (flock); None: there is no such file."""
    with contextlib.suppress(FileNotFoundError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
    return None
