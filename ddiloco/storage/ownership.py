"""A run's folder has one owner at a time: a lock that the system lets go of when the owner's process ends."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import time
from collections.abc import Iterable, Iterator

from ddiloco.config import ConfigError
from ddiloco.storage.folders import check_inside, make_folder
from ddiloco.telemetry.folder_identity import LOCK, take


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
        holder = os.read(file, 500).decode(errors="replace").strip() or "another process"
        raise ConfigError(f"workdir: {workdir}: belongs to a run in progress, of {holder}")
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    with contextlib.suppress(OSError):  # a full disk must not keep a run from owning it
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)
