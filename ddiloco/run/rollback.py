"""Sets a run back to an earlier global step, by the kept versions, or to a snapshot."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from etils import epath

from ddiloco.config import ConfigError
from ddiloco.settings.experiment import Experiment, check_resumable, parse
from ddiloco.storage import array_file, fragment_history, run_mark, shard_states
from ddiloco.storage.learner_state import MAGIC, checkpoint_root
from ddiloco.storage.run_mark import FRAGMENT, RunMarkError
from ddiloco.storage.snapshots import FOLDER, LEARNERS, SYNCER, SnapshotError, SnapshotStore
from ddiloco.storage.tape.recorder import BEGAN
from ddiloco.storage.tape.recorder import FOLDER as TAPES
from ddiloco.storage.workdir import owned, owned_fragments
from ddiloco.telemetry.files import read_values
from ddiloco.telemetry.trimming import TrimPoint, trim

_MADE, _MAKING = "rolled_back", "rolled_back.new"


class RolledBack(NamedTuple):
    """The state of a run after it was set back."""

    step: int  # the newest global step of which a round is left
    versions: tuple[int, ...]  # of each fragment
    previous: pathlib.Path  # where everything later is now


def roll_back(workdir: pathlib.Path, step: int) -> RolledBack:
    """Makes the fragments what they were at a global step; the run is then continued by its syncer.

    What came later, tapes and snapshots too, is moved to `workdir/previous/N`. Learners keep their numbers,
    and begin with a fresh inner state; processes that start anew read again what was undone. The syncer's
    next start draws a new lineage, as every start does, and so recognises learners that hold what was undone.
    An interrupted call is completed by the next one.

    Raises:
      ConfigError: there are no versions of that step, or a process of the run has locked the workdir.
      OSError: the disk refuses.
    """

    def make(folder: pathlib.Path, made: pathlib.Path) -> None:
        try:
            chosen = fragment_history.as_of(folder, step)
        except LookupError as error:
            raise ConfigError(f"to: {error}") from None
        _link(folder, made, {name: kept.path for name, kept in chosen.items()})

    with _alone(workdir):
        if not (workdir / SYNCER).exists() and not (workdir / "previous" / _MADE).exists():
            raise ConfigError(f"workdir: {workdir}: has no syncer's folder")
        if (workdir / SYNCER).exists():
            _prepare(workdir, make)
        versions, newest = _made_of(workdir)
        rounds = read_values(workdir / "rounds.jsonl")
        last = max((r["time"] for r in rounds if r["version"] <= versions[r["fragment"]]), default=0.0)
        previous = trim(workdir, TrimPoint(last, versions, newest))
        _move([workdir / FOLDER], workdir, previous)
        _keep_with_tapes(workdir)
        (workdir / "previous" / _MADE).rename(workdir / SYNCER)
    return RolledBack(newest, versions, previous)


def go_back_to(workdir: pathlib.Path, number: int, experiment: Experiment) -> RolledBack:
    """Sets a run back to the snapshot with this number; it can then be resumed as after any other stop.

    As `roll_back`, with the snapshot's checkpoints of learners; data-parallel runs have those alone.

    Raises:
      ConfigError: there is no such snapshot, it is damaged, the run cannot be resumed from it with these
        settings, or a process of the run has locked the workdir.
      OSError: the disk refuses.
    """
    store = SnapshotStore(workdir / FOLDER, experiment.snapshot.keep)

    def make(folder: pathlib.Path, made: pathlib.Path) -> None:
        found = [path for path in sorted((snapshot.folder / SYNCER).iterdir()) if path.name[0] != "."]
        _link(folder, made, {path.name: path for path in found if path.name.startswith("fragment-")})
        for path in found:  # the folder's own know of more learners
            if not (made / path.name).exists():
                fragment_history.linked_or_copied(path, made / path.name)

    with _alone(workdir):
        try:
            snapshot = store.open(number)
            mark = run_mark.begun(workdir / SYNCER)
            if mark is not None and mark.run != snapshot.header.run:
                raise SnapshotError(f"{snapshot.folder}: is of another run than {workdir / SYNCER}")
            snapshot.check()
        except (SnapshotError, RunMarkError) as error:
            raise ConfigError(f"resume: {error}") from None
        root = checkpoint_root(workdir, experiment.recovery.checkpoint_folder)
        checkpoints = _checkpoints(root / FOLDER / snapshot.folder.name / LEARNERS)
        boundaries, step = _boundaries(checkpoints), snapshot.header.step
        furthest = max([step, *(clock for clock, _ in boundaries.values())])
        check_resumable(parse(snapshot.header.experiment), experiment, furthest)
        _prepare(workdir, make)
        versions, _ = _made_of(workdir)
        previous = trim(workdir, TrimPoint(snapshot.header.time, versions, step, boundaries))
        _move(store.later(number), workdir, previous)
        _exchange_checkpoints(root, checkpoints, previous.name)
        _keep_with_tapes(workdir, checkpoints)
        (workdir / "previous" / _MADE).rename(workdir / SYNCER)
    return RolledBack(step, versions, previous)


def going_on(
    resume: bool | int | None, workdir: pathlib.Path, experiment: Experiment, note: Callable[[str], None]
) -> bool | None:
    """Sets the run back if `resume` is the number of a snapshot; returns the value of `resume` after that.

    `note` gets a line on where later files are. Raises as `go_back_to`.
    """
    if resume is None or isinstance(resume, bool) or experiment.driver == "virtual":
        return resume if resume is None else bool(resume)
    try:
        back = go_back_to(workdir, resume, experiment)
    except OSError as error:
        raise ConfigError(f"workdir: {workdir}: cannot be written to: {error.strerror or error}") from None
    note(f"going on from snapshot {resume}, step {back.step}; the rest is in {back.previous}")
    return True


@contextlib.contextmanager
def _alone(workdir: pathlib.Path) -> Iterator[None]:
    """Owns the workdir, and all fragments in it."""
    if not workdir.is_dir():
        raise ConfigError(f"workdir: {workdir}: is no folder")
    known = [int(path.name.rpartition("-")[2]) for path in (workdir / SYNCER).glob("fragment-[0-9]*")]
    with owned(workdir), owned_fragments(workdir / SYNCER, known):
        yield


def _prepare(workdir: pathlib.Path, make: Callable[[pathlib.Path, pathlib.Path], None]) -> None:
    """Has the syncer's folder made as it was then, beside the present one: whole, or not at all."""
    made, making = workdir / "previous" / _MADE, workdir / "previous" / _MAKING
    shutil.rmtree(making, ignore_errors=True)
    (making / fragment_history.FOLDER).mkdir(parents=True)
    make(workdir / SYNCER, making)
    shutil.rmtree(made, ignore_errors=True)
    making.rename(made)


def _link(folder: pathlib.Path, made: pathlib.Path, chosen: Mapping[str, pathlib.Path]) -> None:
    """Links these files of fragments, the versions kept before them, and what else the folder has."""
    kept = made / fragment_history.FOLDER
    if folder.exists():
        for path in folder.iterdir():
            of_shards = path.name.startswith(shard_states.PREFIX)  # which had not finished then
            if path.is_file() and not of_shards and path.name not in chosen and path.name[0] != ".":
                fragment_history.linked_or_copied(path, made / path.name)
        for name, of_it in fragment_history.versions(folder).items():
            newest = _version(chosen[name])
            for one in of_it:
                if one.version <= newest:
                    fragment_history.linked_or_copied(one.path, kept / one.path.name)
    for name, path in chosen.items():
        fragment_history.linked_or_copied(path, made / name)


def _version(path: pathlib.Path) -> int:
    return int(array_file.load_header(path, FRAGMENT)["version"])


def _made_of(workdir: pathlib.Path) -> tuple[tuple[int, ...], int]:
    """The versions of the fragments that were made ready, and the newest global step of one."""
    paths = sorted((workdir / "previous" / _MADE).glob("fragment-[0-9]*"))
    headers = [array_file.load_header(path, FRAGMENT) for path in paths]
    versions = tuple(int(header["version"]) for header in headers)
    return versions, max((int(header["merged_step"]) for header in headers), default=0)


def _boundaries(checkpoints: Sequence[epath.Path]) -> dict[int, tuple[int, float]]:
    """By learner with a checkpoint on a disk: its step in it, and when that was taken."""
    found = {}
    for path in checkpoints:
        if path.name.startswith("state.0.") and not array_file.in_bucket(path):  # of host 0
            header = array_file.load_header(pathlib.Path(path), MAGIC)
            found[int(path.parent.name)] = int(header["work"]["clock"]), float(header["time"])
    return found


def _move(paths: list[pathlib.Path], workdir: pathlib.Path, previous: pathlib.Path) -> None:
    for path in paths:
        if path.exists():
            target = previous / path.relative_to(workdir)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, target)


def _exchange_checkpoints(root: epath.Path, checkpoints: Sequence[epath.Path], name: str) -> None:
    """Puts these checkpoints of learners in the place of later ones, which go to `previous/name`."""
    for path in _checkpoints(root / LEARNERS):
        target = root / "previous" / name / LEARNERS / path.parent.name
        target.mkdir(parents=True, exist_ok=True)
        path.replace(target / path.name)
    for path in checkpoints:
        _copy(path, root / LEARNERS / path.parent.name)


def _copy(path: epath.Path, folder: epath.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if array_file.in_bucket(path):
        path.copy(folder / path.name, overwrite=True)
    else:
        fragment_history.linked_or_copied(pathlib.Path(path), pathlib.Path(folder / path.name))


def _checkpoints(learners: epath.Path) -> list[epath.Path]:
    """All files of checkpoints below a folder of learners' folders."""
    folders = [one for one in learners.iterdir() if one.name.isdigit()] if learners.exists() else []
    return [path for one in folders for path in one.iterdir() if path.name.startswith("state.")]


def _keep_with_tapes(workdir: pathlib.Path, checkpoints: Sequence[epath.Path] = ()) -> None:
    """Saves the state that the run resumes from beside its next tapes, for replays from there."""
    began = epath.Path(workdir / TAPES / BEGAN)
    shutil.rmtree(began, ignore_errors=True)
    for path in sorted((workdir / "previous" / _MADE).glob("*")):
        if path.is_file() and not path.name.startswith("owner-"):
            _copy(epath.Path(path), began / SYNCER)
    for checkpoint in checkpoints:
        _copy(checkpoint, began / LEARNERS / checkpoint.parent.name)
