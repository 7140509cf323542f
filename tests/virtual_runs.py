"""Runs under the virtual driver."""

import collections
import pathlib
import threading
from typing import Any

from ddiloco.baselines.virtual import run_virtual_baseline
from ddiloco.goodput.accounting import State, Timelines
from ddiloco.outer.global_model import parameters_sha256
from ddiloco.run import job
from ddiloco.run.recipes import assembly_of
from ddiloco.settings.experiment import BASELINES, Experiment
from ddiloco.telemetry import records
from ddiloco.virtual.from_settings import chips_by_learner
from ddiloco.virtual.run import VirtualRun as FleetRun
from tests import workbench


def virtual(data_dir: str, algorithm: str = "decoupled", **groups: Any) -> Experiment:
    """The smallest experiment under the virtual driver."""
    return workbench.experiment(data_dir, algorithm, driver="virtual", **groups)


def run_virtual(experiment: Experiment, stop: threading.Event | None = None) -> "VirtualRun":
    """Runs the experiment to its end, on one device."""
    taken: list[Any] = []
    stop = stop or threading.Event()
    with workbench.devices(1):
        assembly = assembly_of(experiment)
        if experiment.algorithm in BASELINES:
            outcome = run_virtual_baseline(assembly, taken.append, stop)
        else:
            outcome = FleetRun(assembly, taken.append, stop).run()
    return VirtualRun(outcome, taken, experiment)


def run_timed(experiment: Experiment) -> "VirtualRun":
    """Runs the experiment without arrays."""
    taken: list[Any] = []
    outcome = job._run(experiment, None, taken.append, threading.Event())
    return VirtualRun(outcome, taken, experiment)


def run_job(experiment: Experiment, workdir: pathlib.Path, resume: bool = False) -> job.Result:
    """Runs the experiment as a whole job, on one device, that leaves its files in `workdir`."""
    with workbench.devices(1):
        return job.run_job(experiment, workdir, threading.Event(), resume=resume)


class VirtualRun(workbench.Recorded):
    """A virtual run that is over."""

    @property
    def sha256(self) -> str:
        """Of the final parameters."""
        return parameters_sha256(self.outcome.params)

    @property
    def seconds(self) -> float:
        """Virtual seconds from the first record to the last."""
        return max(record.time for record in self.records if hasattr(record, "time"))

    def steps(self, learner: int) -> list[records.StepDone]:
        """The steps of a learner."""
        return [record for record in self.of(records.StepDone) if record.learner == learner]

    def states(self, learner: int) -> list[tuple[float, State, int | None]]:
        """When a learner came into which state, with how many chips."""
        return [(r.time, r.state, r.chips) for r in self.of(records.StateChanged) if r.learner == learner]

    def merges(self, *fields: str) -> list[tuple]:
        """These fields of every merge, in order; a list of learners as a tuple."""
        fixed = [{**values, "learners": tuple(values["learners"])} for values in self.noted("round")]
        return [tuple(values[name] for name in fields) for values in fixed]

    @property
    def tokens(self) -> collections.Counter:
        """Tokens by learner."""
        counted: collections.Counter = collections.Counter()
        for record in self.of(records.StepDone):
            counted[record.learner] += record.tokens
        return counted

    @property
    def timelines(self) -> Timelines:
        """What the recorded states add up to."""
        lines = Timelines(chips_by_learner(self.experiment))
        for record in self.of(records.StateChanged):
            lines.enter(record.learner, record.state, record.time, record.chips)
        return lines
