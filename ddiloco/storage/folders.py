"""Tests whether a folder can be written to, before any work for what will be there."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping

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
