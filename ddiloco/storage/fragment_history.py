"""Earlier versions of the durable fragments, to which a run that went wrong can be rolled back."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import re
import shutil
from typing import NamedTuple

from ddiloco.arrays.finite import check_finite
from ddiloco.storage import array_file
from ddiloco.storage.run_mark import FRAGMENT

FOLDER = "kept"
_NAME = re.compile(r"(fragment-\d+)-version-(\d+)-step-(\d+)")
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV, errno.ENOSYS}


class Kept(NamedTuple):
    """One version of one fragment, whole in a file of its own."""

    path: pathlib.Path
    fragment: str  # the file name of the newest version
    version: int
    step: int  # global step of the round that made it


def keep(path: pathlib.Path, version: int, step: int, most: int) -> None:
    """Keeps the durable fragment at `path` under a name of its own, and no more than `most` of its versions.

    A hard link costs no space until the fragment is replaced; where the disk has none it is a copy.

    Raises:
      OSError: the disk refuses.
    """
    folder = path.parent / FOLDER
    folder.mkdir(exist_ok=True)
    kept = folder / f"{path.name}-version-{version}-step-{step}"
    kept.unlink(missing_ok=True)
    linked_or_copied(path, kept)
    for old in versions(path.parent).get(path.name, [])[:-most]:
        old.path.unlink(missing_ok=True)


def versions(folder: pathlib.Path) -> dict[str, list[Kept]]:
    """By fragment, the versions that the syncer's folder keeps, the oldest first."""
    found: dict[str, list[Kept]] = {}
    for path in (folder / FOLDER).glob("*"):
        if match := _NAME.fullmatch(path.name):
            name, version, step = match.groups()
            found.setdefault(name, []).append(Kept(path, name, int(version), int(step)))
    return {name: sorted(of_it, key=lambda kept: kept.version) for name, of_it in sorted(found.items())}


def as_of(folder: pathlib.Path, step: int) -> dict[str, Kept]:
    """By fragment, its newest version that was merged at this global step or before, and is not damaged.

    Damaged is also one that holds numbers that are not finite.

    Raises:
      LookupError: of some fragment none is kept; the message says from which step on there are all.
    """
    known = versions(folder)
    if not known:
        raise LookupError(f"{folder / FOLDER}: has no versions to go back to")
    absent = sorted({path.name for path in folder.glob("fragment-[0-9]*")} - known.keys())
    if absent:  # not merged since versions are kept
        raise LookupError(f"is {step}, but of {absent[0]} no version is kept yet")
    earliest = max(of_it[0].step for of_it in known.values())
    if step < earliest:
        raise LookupError(f"is {step}, but versions of all fragments are kept from step {earliest} on")
    return {name: _newest_sound(of_it, step) for name, of_it in known.items()}


def _newest_sound(of_it: list[Kept], step: int) -> Kept:
    for kept in reversed(of_it):
        with contextlib.suppress(ValueError):
            if kept.step <= step:
                _, arrays = array_file.load(kept.path, FRAGMENT)
                check_finite((kept.fragment, array) for array in arrays)
                return kept
    raise LookupError(f"is {step}, but all versions of {of_it[0].fragment} from before are damaged")


def linked_or_copied(source: pathlib.Path, target: pathlib.Path) -> None:
    """Makes `target` the same file as `source`, or another with the same bytes; raises OSError."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copy2(source, target)
