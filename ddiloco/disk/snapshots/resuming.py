"""Before a run resumes: finds the newest complete snapshot, and cuts the run's records back to it."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from ddiloco.config import ConfigError
from ddiloco.disk.snapshots.changes import check_resumable
from ddiloco.disk.snapshots.parts import SYNCER_PART, learner_part
from ddiloco.disk.snapshots.store import FOLDER, Snapshot, SnapshotError, SnapshotStore
from ddiloco.observe.trimming import Cut, trim
from ddiloco.settings.experiment import Experiment, parse


def newest_snapshot(experiment: Experiment, workdir: pathlib.Path) -> Snapshot:
    """The newest complete snapshot in the workdir; prints a line about each one that cannot be used.

    With driver=remote only the syncer's arrays are verified here: each learner's process verifies its own.

    Raises:
      ConfigError: there is none, or the run cannot resume from it with these settings.
    """
    folder, own = workdir / FOLDER, [SYNCER_PART] if experiment.driver == "remote" else None
    snapshot = SnapshotStore(folder, experiment.snapshot.keep).newest(_warn, own)
    if snapshot is None:
        raise ConfigError(f"config.resume: is true, but there is no complete snapshot in {folder}")
    check_resumable(parse(snapshot.header["experiment"]), experiment, _furthest(snapshot.header))
    return snapshot


def trim_records(snapshot: Snapshot, workdir: pathlib.Path) -> pathlib.Path:
    """Cuts the run's records back to the snapshot; gives the folder with the rest.

    Raises:
      ConfigError: the disk refuses, or the snapshot has been damaged since it was opened.
    """
    try:
        previous = trim(workdir, _cut(snapshot))
    except SnapshotError as error:
        raise ConfigError(f"config.resume: {error}") from None
    except OSError as error:
        raise ConfigError(f"workdir: {workdir}: cannot be written to: {error.strerror}") from None
    _warn(
        f"resuming from snapshot {snapshot.number}, step {snapshot.header['step']}; the rest is in {previous}"
    )
    return previous


def _cut(snapshot: Snapshot) -> Cut:
    header = snapshot.header
    states = {m: snapshot.state(learner_part(m)) for m in header.get("learners", ())}
    return Cut(
        time=header["time"],
        versions=tuple(header.get("versions", ())),
        step=header["step"],
        times={m: state["time"] for m, state in states.items()},
        unfinished={m: state["unfinished"] for m, state in states.items()},
    )


def _furthest(header: Mapping[str, Any]) -> int:
    """The step of the learner furthest ahead; a resumed run must not end before it."""
    clocks = header.get("clocks", {}).get("learners", {})
    return max([header["step"], *(clock["learners"][m][1] for m, clock in clocks.items())])


def _warn(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
