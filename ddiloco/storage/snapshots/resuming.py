"""Before a run resumes: finds its newest snapshot, checks the settings, and cuts its records back to it."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

from ddiloco.config import ConfigError, Leaf
from ddiloco.outer.fragments import FragmentLayout
from ddiloco.settings.experiment import DECOUPLED_FAMILY, Experiment, all_settings, parse, to_json
from ddiloco.settings.loop import LoopConfig
from ddiloco.storage.snapshots.parts import is_syncers, learner_part
from ddiloco.storage.snapshots.store import FOLDER, Snapshot, SnapshotError, SnapshotStore
from ddiloco.telemetry.trimming import Cut, trim


def newest_snapshot(experiment: Experiment, workdir: pathlib.Path) -> Snapshot:
    """The newest complete snapshot in the workdir; prints a line about each one that cannot be used.

    With driver=remote only the syncer's arrays are verified here: each learner's process verifies its own.

    Raises:
      ConfigError: there is none, or the run cannot resume from it with these settings.
    """
    folder, own = workdir / FOLDER, is_syncers if experiment.driver == "remote" else None
    snapshot = SnapshotStore(folder, experiment.snapshot.keep).newest(_warn, own)
    if snapshot is None:
        raise ConfigError(f"config.resume: is true, but there is no complete snapshot in {folder}")
    header = snapshot.header
    clocks = header.get("clocks", {}).get("learners", {})  # of learners, of which a run must not end before
    furthest = max([header["step"], *(clock["learners"][m][1] for m, clock in clocks.items())])
    check_resumable(parse(header["experiment"]), experiment, furthest)
    return snapshot


def check_resumable(then: Experiment, now: Experiment, step: int = 0) -> None:
    """Raises ConfigError if a run that was `then`, at this global step, may not resume as it is `now`."""
    before = {leaf.path: leaf for leaf in all_settings(then)}
    after = {leaf.path: leaf for leaf in all_settings(now)}
    for path, leaf in (before | after).items():
        was, is_now = (found[path].value if path in found else None for found in (before, after))
        reason = why_fixed(leaf, then, now)
        if reason is not None and was != is_now:
            raise ConfigError(f"config.{path}: is {is_now!r}, but must be {was!r} to resume: {reason}")
    if now.train.steps < step:
        raise ConfigError(
            f"config.train.steps: is {now.train.steps}, but must be at least {step}, the step of the snapshot"
        )


def why_fixed(leaf: Leaf, then: Experiment, now: Experiment) -> str | None:
    """Why this setting must not change; None: it may."""
    if leaf.path == "algorithm" and {then.algorithm, now.algorithm} <= set(DECOUPLED_FAMILY):
        return None
    if leaf.path == "sync.num_learners" and then.algorithm == "lone_learner":
        return "it is the share of the data that the lone learner reads"
    if leaf.path == "sync.num_learners" and isinstance(then.model, LoopConfig):
        return "a loop's batches, which it alone knows, are not shared out again"
    return leaf.metadata["because"] if leaf.metadata["may_change"] == "never" else None


def trim_records(snapshot: Snapshot, workdir: pathlib.Path) -> pathlib.Path:
    """Cuts the run's records back to the snapshot; gives the folder with the rest. May raise ConfigError."""
    header = snapshot.header
    try:
        states = {m: snapshot.state(learner_part(m)) for m in header.get("learners", ())}
        cut = Cut(
            time=header["time"],
            versions=tuple(header.get("versions", ())),
            step=header["step"],
            states={m: (state["clock"], state["time"]) for m, state in states.items()},
        )
        previous = trim(workdir, cut)
    except SnapshotError as error:
        raise ConfigError(f"config.resume: {error}") from None
    except OSError as error:
        raise ConfigError(f"workdir: {workdir}: cannot be written to: {error.strerror or error}") from None
    _warn(f"resuming from snapshot {snapshot.number}, step {header['step']}; the rest is in {previous}")
    return previous


def _warn(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def snapshot_header(experiment: Experiment, layout: FragmentLayout, run: str) -> dict[str, Any]:
    """The part of the header that is the same in all snapshots of a run."""
    return {"experiment": to_json(experiment), "layout": layout.fingerprint, "run": run}
