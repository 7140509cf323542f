"""Prepares a TFDS data set once, whichever of several processes comes first, and never by halves."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import time
from collections.abc import Iterator
from typing import Any

from ddiloco.data.errors import DataError

_POLL_SECONDS = 0.05


def is_prepared(folder: str | os.PathLike[str]) -> bool:
    """Whether `folder`, one version of a data set, is complete: TFDS renames it into place when it is."""
    return pathlib.Path(folder, "dataset_info.json").exists()


def prepare(builder: Any, *, wait_seconds: float, progress: bool) -> None:
    """Downloads and prepares `builder` (a `tfds.core.DatasetBuilder`) as ArrayRecord, unless it is there.

    One process prepares; others wait for it. What a killed preparation left behind is removed first.

    Raises:
      DataError: another process held the lock for longer than `wait_seconds`.
    """
    folder = pathlib.Path(builder.data_dir)
    if is_prepared(folder):
        return
    with _sole_preparer(folder.parent, wait_seconds):
        if is_prepared(folder):
            return
        for remains in [*folder.parent.glob(f"incomplete.*_{folder.name}"), folder]:
            shutil.rmtree(remains, ignore_errors=True)
        with _progress_bar(progress):
            builder.download_and_prepare(file_format="array_record")


@contextlib.contextmanager
def _sole_preparer(folder: pathlib.Path, wait_seconds: float) -> Iterator[None]:
    """Holds the lock of `folder`; the system frees it when its holder dies, so that none is ever stale."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".prepare.lock"
    deadline = time.monotonic() + wait_seconds
    with open(path, "a") as lock:
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


@contextlib.contextmanager
def _progress_bar(shown: bool) -> Iterator[None]:
    from tensorflow_datasets.core.utils import tqdm_utils

    before = tqdm_utils._active
    tqdm_utils.display_progress_bar(before and shown)
    try:
        yield
    finally:
        tqdm_utils.display_progress_bar(before)
