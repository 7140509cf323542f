"""Small runs in virtual time with trouble planted in them, as whole jobs that leave their files."""

import pathlib
import threading
from typing import Any
from unittest import mock

import jax
import numpy as np

from ddiloco.disk import checkpoints
from ddiloco.roles.learner_arrays import TrainingArrays
from ddiloco.run import job
from ddiloco.virtual.run import RecordingObserver, VirtualRun
from tests.virtual_runs import shared_workshop, virtual
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
        settings |= {"lives": "trace", "trace": str(trace)}
    groups = {"sync": FLEET | POLICIES[algorithm] | (sync or {}), "train": {"steps": steps}}
    experiment = virtual(data_dir, algorithm, virtual=settings, **groups)
    job.run_job(experiment, workdir, threading.Event(), live=False)
    return workdir


def with_slow_disk(workdir: pathlib.Path, data_dir: str, learner: int = 2) -> pathlib.Path:
    """A run without arrays of which one learner waits two of the three seconds of a step for its batch."""
    stepped = RecordingObserver.stepped

    def told(observer, number, clock, tokens, metrics, now):
        seconds, waited = (3.0, 2.0) if number == learner else (1.0, 0.01)
        measured = {**metrics, "step_seconds": seconds, "data_wait_seconds": waited}
        stepped(observer, number, clock, tokens, measured, now)

    with mock.patch.object(RecordingObserver, "stepped", told):
        return timed(workdir, data_dir, step_seconds=[1.0, 1.0, 3.0, 1.0])


class Spoilt(TrainingArrays):
    """A learner whose parameters are NaN from its ninth step on."""

    def step(self, clock):
        if clock == 8:
            self._state = jax.tree.map(
                lambda x: x * np.nan if jax.numpy.issubdtype(x.dtype, jax.numpy.floating) else x, self._state
            )
        return super().step(clock)


def with_nan(workdir: pathlib.Path, data_dir: str, learner: int = 1) -> pathlib.Path:
    """A run with arrays of which one learner is spoilt."""
    start = VirtualRun._start

    def spoilt(run: VirtualRun, number: int) -> TrainingArrays:
        return Spoilt(run._equipment[number]) if number == learner else start(run, number)

    experiment = virtual(
        data_dir,
        sync={"num_learners": 3, "num_fragments": 3, "interval": 6},
        train={"steps": 48, "batch_size": 2},
        log={"every": 1},
        tape={"enabled": False},
    )
    with mock.patch.object(VirtualRun, "_start", spoilt), mock.patch.object(checkpoints, "save"):
        shared_workshop().job(experiment, workdir)
    return workdir
