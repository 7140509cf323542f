"""A recorded run, as the commands read it that look at tapes."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Iterator

from ddiloco.settings.experiment import Experiment
from ddiloco.storage.tape.file import TapeError
from experiments.cli import program
from experiments.studies.replay.execution import make_plan, recorded_experiment
from experiments.studies.replay.reading import read_run
from experiments.studies.replay.works import ReplayPlan


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """A run with its settings, and what its actors did by their tapes."""

    workdir: pathlib.Path
    experiment: Experiment
    plan: ReplayPlan


def experiment_of(workdir: str) -> Experiment:
    """The settings of the run in the folder, which end the program with exit code 1 if they cannot be used.

    Raises:
      UsageError: there is no run in the folder.
    """
    folder = pathlib.Path(workdir)
    if not (folder / "config.json").exists():
        raise program.UsageError(f"workdir: {folder}: there is no run in it")
    try:
        return recorded_experiment(folder)
    except TapeError as error:
        sys.exit(f"error: {error}")


@contextlib.contextmanager
def recorded(workdir: str) -> Iterator[RecordedRun]:
    """The run in the folder; warns of what its tapes lack.

    Tapes that cannot be read or followed, here or in the `with` block, end the program with exit code 1.

    Raises:
      UsageError: there is no run in the folder.
    """
    folder = pathlib.Path(workdir)
    experiment = experiment_of(workdir)
    try:
        tapes = read_run(folder)
        for warning in tapes.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        yield RecordedRun(folder, experiment, make_plan(experiment, tapes))
    except TapeError as error:
        sys.exit(f"error: {error}")
