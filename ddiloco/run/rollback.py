"""Rolls a remote run back to an earlier global step, from the versions that its syncer has kept."""

from __future__ import annotations

import pathlib
import shutil
from typing import NamedTuple

from ddiloco.config import ConfigError
from ddiloco.storage import fragment_history, shard_states
from ddiloco.storage.ownership import owned, owned_fragments
from ddiloco.telemetry.files import read_values
from ddiloco.telemetry.trimming import Cut, trim

_SYNCER, _SNAPSHOTS, _MADE = "syncer", "snapshots", "rolled_back"


class RolledBack(NamedTuple):
    """Where a run stands again."""

    step: int  # the newest global step of which a round is left
    versions: tuple[int, ...]  # of each fragment
    previous: pathlib.Path  # where everything later is now


def roll_back(workdir: pathlib.Path, step: int) -> RolledBack:
    """Makes the fragments what they were at a global step; the run is then continued by its syncer.

    What came later, tapes and snapshots too, is moved to `workdir/previous/N`. Learners keep their numbers,
    and begin with a fresh inner state; processes that start anew read again what was undone. The syncer's
    next start draws a new lineage, as every start does, and so recognises learners that hold what was undone.
    Called again after it was interrupted, it goes on.

    Raises:
      ConfigError: there are no versions of that step, or something of the run goes on in the workdir.
      OSError: the disk refuses.
    """
    if not workdir.is_dir():
        raise ConfigError(f"workdir: {workdir}: is no folder")
    known = [int(path.name.rpartition("-")[2]) for path in (workdir / _SYNCER).glob("fragment-[0-9]*")]
    with owned(workdir), owned_fragments(workdir / _SYNCER, known):
        return _roll_back(workdir, step)


def _roll_back(workdir: pathlib.Path, step: int) -> RolledBack:
    folder, made = workdir / _SYNCER, workdir / "previous" / _MADE
    if folder.exists():
        shutil.rmtree(made, ignore_errors=True)
        try:
            chosen = fragment_history.as_of(folder, step)
        except LookupError as error:
            raise ConfigError(f"to: {error}") from None
        _make(folder, made, chosen)
    elif not made.exists():
        raise ConfigError(f"workdir: {workdir}: has no syncer's folder")
    restored = fragment_history.as_of(made, step)
    versions = tuple(one.version for one in restored.values())
    newest = max(one.step for one in restored.values())
    rounds = read_values(workdir / "rounds.jsonl")
    last = max((r["time"] for r in rounds if r["version"] <= versions[r["fragment"]]), default=0.0)
    previous = trim(workdir, Cut(last, versions, newest))
    if (workdir / _SNAPSHOTS).exists():
        previous.mkdir(parents=True, exist_ok=True)
        shutil.move(workdir / _SNAPSHOTS, previous / _SNAPSHOTS)
    # Learners that live have seen the numbers so far, and would take a lower one for one of those.
    numbers = [path.name for path in (workdir / "previous").glob(f"*/{_SNAPSHOTS}/[0-9]*")]
    if numbers:
        (workdir / _SNAPSHOTS / max(numbers, key=int)).mkdir(parents=True, exist_ok=True)
    made.rename(folder)
    return RolledBack(newest, versions, previous)


def _make(folder: pathlib.Path, made: pathlib.Path, chosen: dict[str, fragment_history.Kept]) -> None:
    """The syncer's folder as it was then, beside the present one."""
    (made / fragment_history.FOLDER).mkdir(parents=True)
    for path in folder.iterdir():
        of_shards = path.name.startswith(shard_states.PREFIX)  # which have not finished then
        if path.is_file() and not of_shards and path.name not in chosen and not path.name.startswith("."):
            fragment_history.linked_or_copied(path, made / path.name)
    for name, of_it in fragment_history.versions(folder).items():
        for one in of_it:
            if one.version <= chosen[name].version:
                fragment_history.linked_or_copied(one.path, made / fragment_history.FOLDER / one.path.name)
        fragment_history.linked_or_copied(chosen[name].path, made / name)
