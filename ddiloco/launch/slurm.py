"""A run under Slurm: a job for the syncer, and arrays with a task for each learner and each further shard.

Slurm restarts what it preempts (`--requeue`) and tells it before (`--signal`). What ends otherwise is put
back into the queue by the batch script itself, as long as its exit code asks for that: Slurm knows no other
way. Roles find the syncer in a file on the disk that all nodes share, which each start of it writes.
"""

from __future__ import annotations

import dataclasses
import math
import shlex

from ddiloco.launch.assignment import FINAL, PREFIX
from ddiloco.launch.plan import LaunchedRun, LaunchPlan, filled


@dataclasses.dataclass(frozen=True)
class Slurm:
    """What the nodes are."""

    folder: str  # in which roles begin, of which paths in their settings are; on a disk that all nodes share
    workdir: str  # the run's, an absolute path on such a disk, with file locks
    setup: str = ":"  # a shell command that makes the environment, such as `source .venv/bin/activate`
    learner: str = ""  # options of sbatch for a learner's nodes, such as `--gpus-per-node=8`
    syncer: str = ""  # the same for the node of the syncer, and of each of its shards
    notice: int = 60  # seconds before its end at which a task is told
    evaluator: bool = True  # whether one runs beside the syncer


def plan(fleet: LaunchedRun, slurm: Slurm) -> LaunchPlan:
    """The batch scripts, and the command that submits them."""
    array = [f"--array=0-{fleet.learners - 1}", f"--nodes={fleet.processes}", f"--ntasks={fleet.processes}"]
    values = {
        "fleet": fleet,
        "slurm": slurm,
        "syncer": ["--nodes=1", *shlex.split(slurm.syncer)],
        "shards": [f"--array=1-{fleet.shards - 1}", "--nodes=1", *shlex.split(slurm.syncer)],
        "learners": [*array, "--ntasks-per-node=1", *shlex.split(slurm.learner)],
        "folder": shlex.quote(slurm.folder),
        "workdir": shlex.quote(slurm.workdir),
        "config": shlex.join(fleet.settings),
        "grace": max(1, math.floor(slurm.notice * 0.8)),  # so that the script still has its turn
        "PREFIX": PREFIX,
        "FINAL": FINAL,
    }
    names = ["syncer.sbatch", "learners.sbatch", "submit.sh", *["shards.sbatch"] * (fleet.shards > 1)]
    return LaunchPlan({name: filled(f"slurm_{name}", **values) for name in names}, [["./submit.sh"]])
