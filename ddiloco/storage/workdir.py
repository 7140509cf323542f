"""A run's folder: whether it can be written to, and its one owner, by a lock that ends with its process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping

from ddiloco.config import ConfigError
from ddiloco.telemetry.trimming import LOCK


@contextlib.contextmanager
def owned(workdir: pathlib.Path) -> Iterator[None]:
    """Owns the folder, made if it is not there, until the `with` block ends or this process does.

    The locked file stays, and says which process has the folder or had it last.

    Raises:
      ConfigError: another run has it, or it cannot be written to or locked.
    """
    try:
        make_folder(workdir)
        check_inside(workdir, {"previous": True})
        file = os.open(workdir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"workdir: {workdir}: cannot be written to: {error.strerror or error}") from None
    try:
        _lock(workdir, file)
        yield
    finally:
        os.close(file)


@contextlib.contextmanager
def owned_fragments(folder: pathlib.Path, fragments: Iterable[int]) -> Iterator[None]:
    """Likewise owns these fragments of a run's durable state, as the process that writes them must.

    Raises:
      ConfigError: another process has one of them.
    """
    with contextlib.ExitStack() as stack:
        for p in fragments:
            file = os.open(folder / f"owner-{p:04d}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            stack.callback(os.close, file)
            _lock(folder, file)
        yield


def _lock(workdir: pathlib.Path, file: int) -> None:
    try:
        taken = take(file)
    except OSError as error:
        raise ConfigError(f"workdir: {workdir}: cannot be locked (flock): {error.strerror}") from None
    if not taken:
        raise _refusal(workdir, os.read(file, 500))
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    with contextlib.suppress(OSError):  # a full disk must not keep a run from owning it
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)


def check_free(workdir: pathlib.Path) -> None:
    """Tells at once what `owned` would tell after all else that a run checks; makes nothing.

    Raises:
      ConfigError: another run has the folder.
    """
    with contextlib.suppress(OSError):
        if is_locked(lock := workdir / LOCK):
            raise _refusal(workdir, lock.read_bytes()[:500])


def _refusal(workdir: pathlib.Path, holder: bytes) -> ConfigError:
    of = holder.decode(errors="replace").strip() or "another process"
    return ConfigError(f"workdir: {workdir}: belongs to a run in progress, of {of}")


_BELOW = 256  # bytes of the longest path below a run's folder, of a file in a checkpoint


def check_folder(path: pathlib.Path) -> None:
    """Tries whether the folder can be made and written to; makes nothing.

    Raises:
      OSError: it cannot; `strerror` names the link or file that is in the way.
    """
    path = path.absolute()
    way = (*reversed(path.parents), path)
    for part in way:
        if os.path.islink(part) and not os.path.exists(part):
            raise OSError(errno.ENOENT, f"{part} is a link to {os.readlink(part)}, which is not there")
        if os.path.lexists(part) and not os.path.isdir(part):
            raise OSError(errno.ENOTDIR, f"{part} is there, and is no folder")
    here = existing(path)
    longest = max(len(os.fsencode(part.name)) for part in way)
    for what, length, limit in (
        ("name", longest, os.pathconf(here, "PC_NAME_MAX")),
        ("path", len(os.fsencode(path)), os.pathconf(here, "PC_PATH_MAX") - _BELOW),
    ):
        if length > limit:
            raise OSError(errno.ENAMETOOLONG, f"its {what} has {length} bytes, and may have {limit}")
    with tempfile.TemporaryFile(dir=here):
        pass


def make_folder(path: pathlib.Path) -> pathlib.Path:
    """The folder, made where it is not there and tried; raises OSError as `check_folder` does."""
    check_folder(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def check_inside(folder: pathlib.Path, names: Mapping[str, bool]) -> None:
    """Tries what is in the folder already, of names that say whether they are folders; raises OSError."""
    for name, is_folder in names.items():
        path = folder / name
        if is_folder and os.path.lexists(path):
            check_folder(path)
        elif not is_folder and os.path.isdir(path):
            raise OSError(errno.EISDIR, f"{path} is there, and is a folder")


def existing(path: pathlib.Path) -> pathlib.Path:
    """The nearest existing folder on the path."""
    return next(part for part in (path.absolute(), *path.absolute().parents) if os.path.isdir(part))


def free_bytes(path: pathlib.Path) -> tuple[int, int]:
    """The device of the file system that the path is or would be on, and how many bytes are free there."""
    here = existing(path)
    return os.stat(here).st_dev, shutil.disk_usage(here).free


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
        # Another process only tests the lock, which takes an instant.
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
