"""Runs as the tasks of one Slurm array: the first call submits it, later ones show how far it is."""

from __future__ import annotations

import getpass
import pathlib
import subprocess
from collections.abc import Sequence

from ddiloco.launch import slurm
from ddiloco.storage import array_file
from experiments.cli import program
from experiments.studies import runs
from experiments.studies.runs import PlannedRun

_ARRAY = "array"  # the file with the number of the newest one


def submit(planned: Sequence[PlannedRun], nodes: slurm.Nodes, folder: pathlib.Path, dry_run: bool) -> int:
    """Submits what lacks something, unless runs of the last array are in the queue; returns the exit code.

    The array's files are in `folder`. `dry_run`: only writes them and prints the command.
    """
    if (queued := _in_queue(folder)) is not None:
        program.print_err(queued)
        return 0
    lacking = [run for run in planned if run.lacks() is not None]
    if not lacking:
        return 0
    commands = []
    for one in lacking:
        command = one.command()  # without `again` where another run is to be set aside, once
        commands.append(slurm.ArrayTask(command, [more for more in one.again() if more not in command]))
    plan = slurm.plan_runs(folder.parent.name, runs.PROGRAM, commands, nodes)
    with program.os_errors_as_usage("output", folder):
        plan.write(folder)
    program.print_err(str(folder / "runs.sbatch"))
    if dry_run:
        print(plan.shown())
        return 0

    def run(command: Sequence[str], cwd: pathlib.Path) -> int:
        done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, text=True)
        if not done.returncode:
            number = done.stdout.strip().partition(";")[0]  # the cluster's name may follow
            array_file.replace(folder / _ARRAY, [number.encode()])
            program.print_err(f"array {number}: {len(lacking)} runs; to end them: scancel {number}")
        return done.returncode

    with program.os_errors_as_usage("launcher", pathlib.Path("sbatch")):
        return plan.carry_out(folder, run)


def _in_queue(folder: pathlib.Path) -> str | None:
    """A line on the runs of the last array that are waiting or under way; None if there is none.

    Raises:
      UsageError: Slurm cannot say; another array might have the same runs.
    """
    if not (folder / _ARRAY).is_file():
        return None
    number = (folder / _ARRAY).read_text()
    asked = ["squeue", "--noheader", "--array", f"--user={getpass.getuser()}", "--format=%F %T"]
    with program.os_errors_as_usage("launcher", pathlib.Path("squeue")):
        answer = subprocess.run(asked, capture_output=True, text=True)
    if answer.returncode:
        raise program.UsageError(f"launcher: squeue: {answer.stderr.strip() or answer.returncode}")
    jobs = [line.split() for line in answer.stdout.splitlines()]
    states = [state for array, state in jobs if array == number]
    if not states:
        return None
    running = states.count("RUNNING")
    return f"array {number}: {running} runs are under way, {len(states) - running} wait in the queue"
