"""Checks the places where a run will write: permissions, and room for what it saves."""

from __future__ import annotations

import pathlib

from ddiloco.config import ConfigError
from ddiloco.run import memory_needs
from ddiloco.settings.experiment import BASELINES, Experiment
from ddiloco.storage.durable import FOLDER as DURABLE
from ddiloco.storage.folders import check_inside, free_bytes
from ddiloco.storage.snapshots import FOLDER as SNAPSHOTS
from ddiloco.telemetry import formatting
from ddiloco.telemetry.trimming import FOLDERS, OF_RUNS
from ddiloco.workers.assembly import Assembly

CHECKPOINTS = "checkpoints"  # of a run, in its workdir


def check_places(experiment: Experiment, workdir: pathlib.Path) -> None:
    """Tries what an earlier start has left in the workdir, where the run goes on with it; raises OSError."""
    names = {name: name in FOLDERS for name in sorted(OF_RUNS)}
    check_inside(workdir, names | {f"learners/{m}": True for m in range(experiment.most_learners)})


def saved_bytes(experiment: Experiment, assembly: Assembly) -> dict[str, int]:
    """By folder of the workdir, the bytes that the run saves there at least.

    These are a checkpoint of the parameters in float32, one snapshot of the whole state if any are taken, and
    a version of each fragment. What a loop's state takes only it knows.
    """
    e, params = experiment, 4 * assembly.num_params
    baseline = e.algorithm in BASELINES
    outer = 0 if baseline else memory_needs.outer_bytes(e, assembly.layout)
    found = {CHECKPOINTS: params}
    if e.snapshot.every:
        learners = 1 if baseline else e.sync.num_learners
        found[SNAPSHOTS] = learners * (params + memory_needs.inner_bytes(e)) + (
            0 if baseline else params + outer
        )
    if e.driver != "virtual" and not baseline:
        found[DURABLE] = params + outer
    return found


def check_room(experiment: Experiment, assembly: Assembly, workdir: pathlib.Path) -> None:
    """Raises ConfigError if the disk has less room than what the run saves on it."""
    saved, (_, available) = saved_bytes(experiment, assembly), free_bytes(workdir)
    needed = sum(saved.values())
    if needed > available:
        each = ", ".join(f"{formatting.size(size)} of {name}" for name, size in saved.items())
        raise ConfigError(
            f"workdir: {workdir}: has {formatting.size(available)} ({available:,} bytes) free, but the "
            f"run saves {formatting.size(needed)} ({needed:,} bytes) there: {each}"
        )
