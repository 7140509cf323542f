"""Runs as tasks of a Ray cluster, which places each where there is room, and again where its node died.

All nodes have the runs' folder, the config files and the data at the same paths, on a disk that they share.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import ray

from ddiloco.launch import processes
from experiments.cli import engines, exit_handling, program
from experiments.studies import runs
from experiments.studies.runs import PlannedRun

_FAILED = 1


class RayCluster:
    """An engine of `runs.train`; close it to end all that is under way, and the connection."""

    def __init__(self, address: str | None, cpus: float, gpus: float) -> None:
        """`address`: of the cluster, None as `ray.init` finds or starts one; `cpus`, `gpus`: of a run."""
        with exit_handling.shielded():  # Ray's own processes outlive a Ctrl-C, until the runs are saved
            ray.init(address=address)
        self._options = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": -1}
        self._task = ray.remote(_run)
        self._under_way: dict[Any, PlannedRun] = {}  # by the future of its exit code

    def start(self, run: PlannedRun, sharers: int) -> None:
        """Has Ray start the run once there is room."""
        del sharers  # a node divides its cores by what its tasks asked for
        own = {name: value for name, value in os.environ.items() if name.startswith(engines.PASSED_ON)}
        own["PJRT_NPROC"] = os.environ.get("PJRT_NPROC") or str(max(1, int(self._options["num_cpus"])))
        task = self._task.options(name=run.name, **self._options)
        self._under_way[task.remote(run, str(pathlib.Path.cwd()), own)] = run

    def wait(self) -> list[tuple[PlannedRun, int]]:
        """Waits until one has ended; returns those that have, with their exit codes."""
        done, _ = ray.wait(list(self._under_way))
        return [(self._under_way.pop(one), _code(one)) for one in done]

    def close(self) -> None:
        """Has all save and end."""
        try:
            for one in self._under_way:
                ray.cancel(one)
            if self._under_way:
                ray.wait(list(self._under_way), num_returns=len(self._under_way))
        finally:
            ray.shutdown()


def _code(ended: Any) -> int:
    try:
        code: int = ray.get(ended)
    except ray.exceptions.RayError as error:
        program.print_err(str(error).strip().splitlines()[0])
        return _FAILED
    return code


def _run(run: PlannedRun, folder: str, environment: dict[str, str]) -> int:
    """The exit code of the run, on the node where this is called; it ends with this process."""
    os.chdir(folder)
    process = processes.start(runs.PROGRAM, run.command(), {**os.environ, **environment}, quiet=True)
    try:
        process.join()
    except KeyboardInterrupt:  # by ray.cancel
        process.terminate()
        process.join()
    return int(process.exitcode or 0)
