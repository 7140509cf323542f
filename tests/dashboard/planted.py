"""Small runs in virtual time with trouble planted in them, as whole jobs that leave their files."""

import dataclasses
import json
import os
import pathlib
import shutil
import threading
from typing import Any
from unittest import mock

import jax
import numpy as np

from ddiloco.dashboard.view import RunView
from ddiloco.goodput.accounting import State
from ddiloco.run import job
from ddiloco.run.recipes import assembly_of
from ddiloco.settings.experiment import parse
from ddiloco.storage import checkpoints
from ddiloco.telemetry import monitor, records
from ddiloco.telemetry.trimming import PLAN
from ddiloco.virtual.run import RecordingObserver, VirtualRun
from ddiloco.workers.learner_arrays import TrainingArrays
from experiments.studies.planning import choices
from experiments.studies.planning.table import Plan
from experiments.studies.planning.worth import worth_of
from tests.virtual_runs import run_job, virtual
from tests.workbench import POLICIES

FLEET = {"num_learners": 4, "num_fragments": 6, "interval": 12}


def timed(
    workdir: pathlib.Path,
    data_dir: str,
    *,
    algorithm: str = "decoupled",
    lives: str = "",
    steps: int = 300,
    sync: dict | None = None,
    **fleet: Any,
) -> pathlib.Path:
    """A run without arrays, whose learners have these lives (`time,learner,event,share` a line)."""
    settings = {"arrays": False, "step_seconds": [1.0], **fleet}
    if lives:
        trace = workdir.with_suffix(".csv")
        trace.write_text(f"time,learner,event,share\n{lives}\n")
        settings |= {"availability": "trace", "trace": str(trace)}
    groups = {"sync": FLEET | POLICIES.get(algorithm, {}) | (sync or {}), "train": {"steps": steps}}
    experiment = virtual(data_dir, algorithm, virtual=settings, **groups)
    job.run_job(experiment, workdir, threading.Event())
    return workdir


def with_plan(workdir: pathlib.Path, data_dir: str, **fleet: Any) -> pathlib.Path:
    """A run without arrays, and a plan of it with its own settings and longer intervals."""
    timed(workdir, data_dir, **fleet)
    experiment = parse(json.loads((workdir / "config.json").read_text()))
    fleet_of = choices.of_config(experiment, assembly_of(experiment).layout)
    own, *others = choices.choices(experiment)
    longer = [choice for choice in others if choice.interval in (24, 48)]
    played = choices.play_all(fleet_of, [own, *longer])
    plan = Plan(
        experiment, played, None, worth_of(fleet_of, own, played[0].outcome, experiment.sync.num_learners)
    )
    (workdir / PLAN).write_text(json.dumps(plan.values))
    return workdir


def with_slow_disk(workdir: pathlib.Path, data_dir: str, learner: int = 2, run: Any = timed) -> pathlib.Path:
    """A run of which one learner waits two of the three seconds of a step for its batch."""
    stepped = RecordingObserver.stepped

    def told(observer, number, clock, tokens, metrics, now):
        seconds, waited = (3.0, 2.0) if number == learner else (1.0, 0.01)
        measured = {**metrics, "step_seconds": seconds, "data_wait_seconds": waited}
        stepped(observer, number, clock, tokens, measured, now)

    with mock.patch.object(RecordingObserver, "stepped", told):
        return run(workdir, data_dir, step_seconds=[1.0, 1.0, 3.0, 1.0])


def with_costly_merges(workdir: pathlib.Path, data_dir: str) -> pathlib.Path:
    """A run whose learners' loss rises with each update, and falls with each other step by less."""
    stepped = RecordingObserver.stepped

    def told(observer, number, clock, tokens, metrics, now):
        loss = 2.0 + 1e-4 * clock + 0.05 * ("updates" in metrics)
        stepped(observer, number, clock, tokens, {**metrics, "loss": loss}, now)

    with mock.patch.object(RecordingObserver, "stepped", told):
        return timed(workdir, data_dir)


def halfway(workdir: pathlib.Path, data_dir: str, observe: Any = None, hide: Any = (), **more: Any) -> Any:
    """What a run without arrays has left when learner 0 has taken 200 of its 300 steps, as it goes on.

    `observe` is called with the observer, learner and clock of each step; states in `hide` are told nobody.
    """
    stepped, entered = RecordingObserver.stepped, RecordingObserver.entered

    def told(observer, number, clock, tokens, metrics, now):
        stepped(observer, number, clock, tokens, metrics, now)
        if observe:
            observe(observer, number, clock, now)
        if (number, clock) == (0, 200):
            records.write_out(observer._record, 60.0, summary=True)
            whole = workdir.with_name(f"{workdir.name}.whole")
            # Files that begin with a dot are about to become others.
            shutil.copytree(whole, workdir, ignore=shutil.ignore_patterns(".*"))

    def seen(observer, number, state, chips, now):
        if state not in hide:
            entered(observer, number, state, chips, now)

    patched = mock.patch.multiple(RecordingObserver, stepped=told, entered=seen)
    with patched, mock.patch.object(monitor, "SUMMARY_EVERY", 0.0):
        timed(workdir.with_name(f"{workdir.name}.whole"), data_dir, **more)
    os.utime(workdir / "summary.json", (2e9, 2e9))  # it goes on, however late somebody looks
    return workdir


def with_hang(workdir: pathlib.Path, data_dir: str, learner: int = 2) -> pathlib.Path:
    """A run that goes on, of which one learner takes no step any more, and nobody knows why."""
    return halfway(workdir, data_dir, hide=[State.DETECTING], lives=f"100,{learner},detect,")


def with_missing_host(workdir: pathlib.Path, data_dir: str, learner: int = 2) -> pathlib.Path:
    """A run that goes on, of which one learner's third host has lost its connection."""

    def observe(observer, number, clock, now):
        if number == learner and clock in (1, 100, 120, 150):
            hosts = range(3) if clock == 1 else [2]
            name = "host_gone" if clock in (100, 150) else "host_here"
            for host in hosts:
                observer.noted(name, {"learner": learner, "host": host, "hosts": 3}, now)

    return halfway(workdir, data_dir, observe)


def as_processes(view: RunView) -> RunView:
    """The same as if its learners were processes that go on."""
    return dataclasses.replace(view, status="running", config={**view.config, "driver": "remote"})


class Spoilt(TrainingArrays):
    """A learner whose parameters are multiplied by this from its ninth step on."""

    factor = np.nan

    def step(self, clock):
        if clock == 8 or (clock > 8 and np.isfinite(self.factor)):
            self._state = jax.tree.map(
                lambda x: x * self.factor if jax.numpy.issubdtype(x.dtype, jax.numpy.floating) else x,
                self._state,
            )
        return super().step(clock)


class Inflated(Spoilt):
    """A learner whose parameters grow by a tenth with each step."""

    factor = 1.1


class Overflowing(TrainingArrays):
    """A learner whose every third step is skipped."""

    def step(self, clock):
        before = self._equipment.program.copy(self._state)
        tokens, metrics = super().step(clock)
        if clock % 3 == 2:
            self._state, metrics = before, {**metrics, "skipped": jax.numpy.int32(1)}
        return tokens, metrics


def with_arrays(
    workdir: pathlib.Path,
    data_dir: str,
    arrays: type[TrainingArrays] = Spoilt,
    learner: int = 1,
    learners: int = 3,
    interval: int = 6,
    steps: int = 48,
    **fleet: Any,
) -> pathlib.Path:
    """A run with arrays of which one learner has these."""
    start = VirtualRun._start

    def spoilt(run: VirtualRun, number: int) -> TrainingArrays:
        return arrays(run._equipment[number]) if number == learner else start(run, number)

    experiment = virtual(
        data_dir,
        virtual=fleet,
        sync={"num_learners": learners, "num_fragments": 3, "interval": interval},
        train={"steps": steps, "batch_size": 2},
        log={"every": 1},
        tape={"enabled": False},
    )
    with mock.patch.object(VirtualRun, "_start", spoilt), mock.patch.object(checkpoints, "save"):
        run_job(experiment, workdir)
    return workdir
