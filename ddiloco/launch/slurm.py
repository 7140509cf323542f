"""A run under Slurm: a job for the syncer, and an array with a task for each learner.

Slurm restarts what it preempts (`--requeue`) and tells it before (`--signal`). What ends otherwise is put
back into the queue by the batch script itself, as long as its exit code asks for that: Slurm knows no other
way. Roles find the syncer in a file on the disk that all nodes share, which each start of it writes.
"""

from __future__ import annotations

import dataclasses
import math
import shlex

from ddiloco.launch.assignment import FINAL, PREFIX
from ddiloco.launch.plan import Fleet, Plan

_SUBMIT = """\
#!/bin/bash
set -euo pipefail
syncer=$(sbatch --parsable syncer.sbatch)
learners=$(sbatch --parsable learners.sbatch)
echo "syncer $syncer, learners $learners; to end the run: scancel $syncer $learners"
"""

# Slurm tells the script with --signal=B, and the script has Slurm tell the processes: an srun that gets
# SIGTERM itself kills them at once. `wait` returns for each signal, and a last time when the step has ended.
_RUN = """\
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM
{start} &
step=$!
code=0
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do
  code=0
  wait "$step" || code=$?
done
case "$code" in
  {final}) exit "$code" ;;
esac
echo "exit code $code: back into the queue" >&2
scontrol requeue "{job}"
"""


@dataclasses.dataclass(frozen=True)
class Slurm:
    """What the nodes are.

    Attributes:
      workdir: on a disk that all nodes share, with file locks.
      setup: a shell command that makes the environment, such as `source .venv/bin/activate`.
      learner: options of sbatch for a learner's nodes, such as `--gpus-per-node=8`.
      syncer: the same for the syncer's node.
      notice: seconds before its end at which a task is told.
      evaluator: whether one runs beside the syncer.
    """

    workdir: str
    setup: str = ":"
    learner: str = ""
    syncer: str = ""
    notice: int = 60
    evaluator: bool = True


def plan(fleet: Fleet, slurm: Slurm) -> Plan:
    """The batch scripts, and the command that submits them."""
    files = {
        "syncer.sbatch": _syncer(fleet, slurm),
        "learners.sbatch": _learners(fleet, slurm),
        "submit.sh": _SUBMIT,
    }
    return Plan(files, [["./submit.sh"]])


def _syncer(fleet: Fleet, slurm: Slurm) -> str:
    workdir, config = shlex.quote(slurm.workdir), shlex.join(fleet.config)
    evaluator = ""
    if slurm.evaluator:
        evaluator = (
            f"JAX_PLATFORMS=cpu srun --overlap --ntasks=1 python -m experiments.evaluator {config} "
            f"--workdir={workdir} &\n"
        )
    start = (
        f"srun --overlap --ntasks=1 python -m experiments.syncer {config} --workdir={workdir} "
        f'--listen="$address" --resume=auto'
    )
    return (
        _head(fleet, slurm, "syncer", ["--nodes=1", *shlex.split(slurm.syncer)])
        + f'address="$(hostname -f):{fleet.port}"\n'
        + f"mkdir -p {workdir}.launch\n"
        + f'echo "$address" > {workdir}.launch/address.new\n'
        + f"mv {workdir}.launch/address.new {workdir}.launch/address\n"
        + f"export {PREFIX}TOKEN_FILE={workdir}.tokens/tokens {PREFIX}GRACE={_grace(slurm)}\n"
        + evaluator
        + _run(start, "$SLURM_JOB_ID")
    )


def _learners(fleet: Fleet, slurm: Slurm) -> str:
    workdir, array = shlex.quote(slurm.workdir), f"--array=0-{fleet.learners - 1}"
    nodes = [array, f"--nodes={fleet.processes}", f"--ntasks={fleet.processes}", "--ntasks-per-node=1"]
    several = (
        ""
        if fleet.processes == 1
        else (
            f"export {PREFIX}PROCESSES={fleet.processes}\n"
            f'export {PREFIX}COORDINATOR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):'
            f'$(({fleet.coordinator_port} + 2 * SLURM_ARRAY_TASK_ID))"\n'
        )
    )
    command = (
        f"exec python -m experiments.learner {shlex.join(fleet.config)} "
        '--config.remote.donor_host="$(hostname -i | cut -d" " -f1)"'
    )
    # Which process of the learner this is, srun says in the environment of each.
    task = f'export {PREFIX}PROCESS="$SLURM_PROCID"; {command}' if fleet.processes > 1 else command
    return (
        _head(fleet, slurm, "learner", [*nodes, *shlex.split(slurm.learner)])
        + f"until [ -s {workdir}.launch/address ]; do sleep 5; done\n"
        + f'export {PREFIX}SYNCER="$(cat {workdir}.launch/address)"\n'
        + f'export {PREFIX}LEARNER="$SLURM_ARRAY_TASK_ID" {PREFIX}WORKDIR={workdir}\n'
        + f'export {PREFIX}TOKEN_FILE={workdir}.tokens/learner-"$SLURM_ARRAY_TASK_ID"\n'
        + f"export {PREFIX}GRACE={_grace(slurm)}\n"
        + several
        + _run(
            f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(task)}",
            "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID",
        )
    )


def _head(fleet: Fleet, slurm: Slurm, role: str, options: list[str]) -> str:
    known = [
        f"--job-name={fleet.name}-{role}",
        "--requeue",
        "--open-mode=append",
        f"--signal=B:TERM@{slurm.notice}",
    ]
    lines = [f"#SBATCH {option}" for option in [*known, *options]]
    # srun does not take over by itself how many cores a task may have.
    cores = '[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"'
    return "\n".join(["#!/bin/bash", *lines, "set -uo pipefail", cores, slurm.setup, ""])


def _run(start: str, job: str) -> str:
    return _RUN.format(start=start, job=job, final="|".join(map(str, FINAL)))


def _grace(slurm: Slurm) -> int:
    """Less than the notice, so that the script still has its turn."""
    return max(1, math.floor(slurm.notice * 0.8))
