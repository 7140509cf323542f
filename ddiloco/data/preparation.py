"""Prepares a TFDS data set once, in one of the processes that ask for it, completely or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any

from ddiloco.data.errors import DataError
from ddiloco.telemetry.waits import waiting

_POLL_SECONDS = 0.05


def is_prepared(folder: str | os.PathLike[str]) -> bool:
    """Whether `folder`, a version of a data set, is complete: TFDS renames it into place at the end."""
    return pathlib.Path(folder, "dataset_info.json").exists()


def prepare(builder: Any, *, wait_seconds: float, progress: bool) -> None:
    """Downloads and prepares the data set of a `tfds.core.DatasetBuilder` as ArrayRecord, if need be.

    One process prepares it and others wait. What a killed preparation left behind is removed first.
    `progress`: whether TFDS may show it, on a terminal.

    Raises:
      DataError: another process held the lock for longer than `wait_seconds`.
    """
    folder = pathlib.Path(builder.data_dir)
    if is_prepared(folder):
        return
    with sole_preparer(folder.parent, wait_seconds):
        if is_prepared(folder):
            return
        for remains in [*folder.parent.glob(f"incomplete.*_{folder.name}"), folder]:
            shutil.rmtree(remains, ignore_errors=True)
        if not (progress and sys.stderr.isatty()):
            import tensorflow_datasets as tfds

            tfds.disable_progress_bar()
        builder.download_and_prepare(file_format="array_record")


@contextlib.contextmanager
def sole_preparer(folder: pathlib.Path, wait_seconds: float) -> Iterator[None]:
    """Holds the lock of `folder`, which the system releases if the process dies: it never gets stale.

    Raises:
      DataError: another process held it for longer than `wait_seconds`.
      OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".prepare.lock"
    deadline = time.monotonic() + wait_seconds
    with open(path, "a") as lock:
        with waiting(f"the process that prepares {folder} (it holds {path})"):
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise DataError(
                            f"another process has been preparing {folder} for {wait_seconds:g} s (it holds "
                            f"{path}); end it or give another data_dir"
                        ) from None
                    time.sleep(_POLL_SECONDS)
        yield
