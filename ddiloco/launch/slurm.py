"""A run under Slurm: a job for the syncer, and arrays with a task for each learner and each further shard.

Slurm restarts preempted jobs (`--requeue`) and signals them before (`--signal`). The batch script itself
requeues jobs that end otherwise, if their exit code asks for it. Roles find the syncer by a file on the
nodes' shared disk, which each start of it writes.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from ddiloco.launch.assignment import FINAL, PREEMPTED, PREFIX
from ddiloco.launch.plan import LaunchedRun, LaunchPlan, filled

_CODES = {"PREFIX": PREFIX, "FINAL": FINAL, "PREEMPTED": PREEMPTED}


@dataclasses.dataclass(frozen=True)
class Slurm:
    """The nodes and their options."""

    folder: str  # working directory of roles, on a disk that all nodes share
    workdir: str  # the run's, an absolute path on such a disk, with file locks
    setup: str = ":"  # a shell command that sets up the environment, such as `source .venv/bin/activate`
    learner: str = ""  # options of sbatch for a learner's nodes, such as `--gpus-per-node=8`
    syncer: str = ""  # the same for the node of the syncer, and of each of its shards
    notice: int = 60  # seconds from the signal to a task's end
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
        "grace": max(1, math.floor(slurm.notice * 0.8)),  # the rest is for the script
        **_CODES,
    }
    names = ["syncer.sbatch", "learners.sbatch", "submit.sh", *["shards.sbatch"] * (fleet.shards > 1)]
    return LaunchPlan({name: filled(f"slurm_{name}", **values) for name in names}, [["./submit.sh"]])


class ArrayTask(NamedTuple):
    """The arguments of one of many runs, and those that are added where the job was in the queue before."""

    arguments: Sequence[str]
    again: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Nodes:
    """The nodes of runs that have one each, and their options."""

    folder: str  # working directory of the runs, on a disk that all nodes share
    setup: str = ":"  # a shell command that sets up the environment, such as `source .venv/bin/activate`
    options: str = ""  # of sbatch, such as `--gpus-per-node=8`
    notice: int = 60  # seconds from the signal to a task's end
    at_once: int | None = None  # tasks that run at a time; None: as many as there is room for


def plan_runs(name: str, module: str, runs: Sequence[ArrayTask], nodes: Nodes) -> LaunchPlan:
    """The batch script of an array with a task for each run of `python -m MODULE`, and its submission.

    A task that is told to leave continues later. One that fails is tried three times more.
    """
    limit = f"%{nodes.at_once}" if nodes.at_once else ""
    values = {
        "fleet": {"name": name},
        "slurm": nodes,
        "options": [f"--array=0-{len(runs) - 1}{limit}", "--nodes=1", *shlex.split(nodes.options)],
        "folder": shlex.quote(nodes.folder),
        "module": module,
        "runs": runs,
        **_CODES,
    }
    return LaunchPlan(
        {"runs.sbatch": filled("slurm_runs.sbatch", **values)}, [["sbatch", "--parsable", "runs.sbatch"]]
    )
