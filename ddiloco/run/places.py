"""Where a run will write: whether it can, and whether there is room for what it saves."""

from __future__ import annotations

import collections
import pathlib

from ddiloco.config import ConfigError
from ddiloco.run import memory_needs
from ddiloco.settings.experiment import BASELINES, Experiment
from ddiloco.storage.durable import FOLDER as DURABLE
from ddiloco.storage.folders import check_inside, free_bytes
from ddiloco.storage.snapshots.store import FOLDER as SNAPSHOTS
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
    """Raises ConfigError if a disk has less room than what the run saves on it.

    Only the snapshots that a run resumes from may be on another disk than the workdir: all else begins anew.
    """
    kept = SNAPSHOTS if experiment.resume else None
    saved, free = saved_bytes(experiment, assembly), dict[str, int]()
    names = collections.defaultdict[int, list[str]](list)  # by device
    for name in saved:
        device, free[name] = free_bytes(workdir / name if kept == name else workdir)
        names[device].append(name)
    for together in names.values():
        needed, available = sum(saved[name] for name in together), free[together[0]]
        if needed > available:
            each = ", ".join(f"{formatting.size(saved[name])} of {name}" for name in together)
            raise ConfigError(
                f"workdir: {workdir}: has {formatting.size(available)} ({available:,} bytes) free, but "
                f"the run saves {formatting.size(needed)} ({needed:,} bytes) there: {each}"
            )
