"""The parts of a run, made from its settings: layout, programs, data, evaluation."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ddiloco.config import ConfigError
from ddiloco.outer.fragments import FragmentLayout, fragment
from ddiloco.roles.learner_arrays import Equipment
from ddiloco.roles.transfer import FragmentTransfer
from ddiloco.settings.experiment import BASELINES, Experiment, task_of
from ddiloco.tasks.task import Task
from ddiloco.training.evaluation import Score, evaluate, make_eval_step
from ddiloco.training.mesh import MeshConfig, carve, parameter_shardings, rows_divisor
from ddiloco.training.parameters import abstract_parameters, init_parameters
from ddiloco.training.program import TrainProgram


def make_layout(experiment: Experiment) -> FragmentLayout:
    """How the model's parameters are cut into fragments; allocates nothing.

    Raises:
      ConfigError: the model has fewer pieces than there are to be fragments.
    """
    shapes = {name: leaf.shape for name, leaf in abstract_parameters(experiment.model).items()}
    try:
        return fragment(
            shapes,
            experiment.sync.num_fragments,
            experiment.outer.fragmentation,
            split_large=experiment.outer.split_large,
        )
    except ValueError as error:
        raise ConfigError(f"config.sync.num_fragments: {error}") from None


def check_rows(experiment: Experiment, mesh: Mesh, rows: int) -> None:
    """Checks that a job's rows of one step divide among its devices and micro-batches, and the held-out rows.

    Raises:
      ConfigError: they do not.
    """
    ways, parts = rows_divisor(mesh), experiment.inner.accumulation
    for name, count in (("train.batch_size", rows), ("eval.batch_size", experiment.eval.batch_size)):
        if count % ways:
            raise ConfigError(
                f"config.{name}: gives {count} rows, but must give a multiple of {ways}, "
                "the devices that share them"
            )
    if rows % parts:
        raise ConfigError(
            f"config.inner.accumulation: is {parts}, but a step has {rows} rows, which is no multiple of it"
        )


class Assembly:
    """Makes the parts of a run and shares what learners on the same mesh can share."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.task: Task = task_of(experiment)

    @functools.cached_property
    def layout(self) -> FragmentLayout:
        """How the parameters are cut into fragments."""
        return make_layout(self.experiment)

    def initial_parameters(self) -> dict[str, np.ndarray]:
        """The parameters at step 0, on the host: a function of the model and the seed."""
        params = init_parameters(self.experiment.model, self.experiment.seed)
        return {name: np.asarray(value) for name, value in params.items()}

    def learner_meshes(self) -> list[Mesh]:
        """One mesh for each learner."""
        return carve(jax.devices(), self.experiment.sync.num_learners, self.experiment.mesh)

    def jobs(self) -> list[tuple[Mesh, tuple[int, ...]]]:
        """Mesh and shards of all that steps: of each learner, or of the one job of a baseline."""
        learners = range(self.experiment.sync.num_learners)
        if self.experiment.algorithm not in BASELINES:
            return [(mesh, (m,)) for m, mesh in enumerate(self.learner_meshes())]
        mesh = carve(jax.devices(), 1, self.experiment.mesh)[0]
        return [(mesh, (0,) if self.experiment.algorithm == "lone_learner" else tuple(learners))]

    def check(self) -> None:
        """Finds what cannot work, before anything is compiled.

        Raises:
          ConfigError: fragments, mesh and rows do not fit each other or the devices here.
          DataError: the data set cannot be opened, or has too little in a split.
        """
        if self.experiment.algorithm not in BASELINES:
            _ = self.layout
        for mesh, shards in self.jobs():
            rows = sum(self.experiment.batch_size(shard) for shard in shards)
            check_rows(self.experiment, mesh, rows)
            self.batches(shards, rows)
        _ = self.held_out

    def check_learner(self, learner: int) -> None:
        """Finds what cannot work in a process that is this one learner; raises as `check` does."""
        _ = self.layout
        rows = self.experiment.batch_size(learner)
        check_rows(self.experiment, self.own_mesh(), rows)
        self.batches((learner,), rows)

    def check_syncer(self) -> None:
        """Finds what cannot work in a process that is the syncer; raises as `check` does."""
        _ = self.layout
        _ = self.held_out

    def own_mesh(self) -> Mesh:
        """The mesh of the one learner of this process: all devices that the process sees."""
        return carve(jax.devices(), 1, self.experiment.mesh)[0]

    def evaluation_mesh(self) -> Mesh:
        """One device to evaluate on while learners train: one that no learner uses, where there is one.

        A single device needs no collectives: on devices that a learner also uses, those of two threads
        could wait for each other for ever.
        """
        used = {device for mesh in self.learner_meshes() for device in mesh.devices.flat}
        idle = [device for device in jax.devices() if device not in used]
        return carve((idle or [jax.devices()[-1]])[:1], 1, MeshConfig())[0]

    def equipment(self) -> list[Equipment]:
        """What each learner works with, compiled; different meshes compile at the same time."""
        e = self.experiment
        meshes = self.learner_meshes()
        keys = [(mesh, e.batch_size(m)) for m, mesh in enumerate(meshes)]
        with concurrent.futures.ThreadPoolExecutor(max_workers=8) as pool:
            programs = dict(
                zip(dict.fromkeys(keys), pool.map(self._program, dict.fromkeys(keys)), strict=True)
            )
            transfers = dict(
                zip(dict.fromkeys(meshes), pool.map(self._transfer, dict.fromkeys(meshes)), strict=True)
            )
        return [self._equipment(m, programs[key], transfers[key[0]], key[1]) for m, key in enumerate(keys)]

    def own_equipment(self, learner: int) -> Equipment:
        """What the one learner of this process works with, compiled."""
        mesh, rows = self.own_mesh(), self.experiment.batch_size(learner)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:  # loading what is in the cache holds no lock
            program = pool.submit(self._program, (mesh, rows))
            transfer = self._transfer(mesh)
        return self._equipment(learner, program.result(), transfer, rows)

    def reassigned(self, equipment: Equipment, learner: int) -> Equipment:
        """The same programs for another learner, which draws as many rows."""
        return self._equipment(
            learner, equipment.program, equipment.transfer, self.experiment.batch_size(learner)
        )

    def batches(self, shards: Sequence[int], batch_size: int) -> Iterator[dict[str, np.ndarray]]:
        """The training batches of these shards, out of one shard for each learner."""
        return self.task.batches(shards, self.experiment.sync.num_learners, batch_size)

    def program(self, mesh: Mesh, rows: int) -> TrainProgram:
        """The compiled step for this mesh and number of rows."""
        return self._program((mesh, rows))

    @functools.cached_property
    def held_out(self) -> list[dict[str, np.ndarray]]:
        """The held-out batches, the same for every run on this data."""
        e = self.experiment
        return self.task.held_out(e.eval.batch_size, e.eval.num_batches)

    def scorer(self, mesh: Mesh) -> Callable[[Mapping[str, Any]], Score]:
        """A function from parameters (host or device arrays) to their held-out score."""
        e, batches = self.experiment, self.held_out
        step = make_eval_step(e.model, mesh, self.task.loss)
        shardings = parameter_shardings(e.model, mesh)

        def score(params: Mapping[str, Any]) -> Score:
            placed = {name: jax.device_put(value, shardings[name]) for name, value in params.items()}
            return evaluate(e.model, step, placed, batches, mesh)

        return score

    def _equipment(
        self, learner: int, program: TrainProgram, transfer: FragmentTransfer, rows: int
    ) -> Equipment:
        e = self.experiment
        return Equipment(
            program=program,
            transfer=transfer,
            batches=self.batches((learner,), rows),
            steps_in_flight=e.train.steps_in_flight,
            min_step_seconds=e.min_step_seconds(learner),
            sdc_check_every=e.sdc_check_every,
        )

    def _program(self, key: tuple[Mesh, int]) -> TrainProgram:
        e = self.experiment
        mesh, rows = key
        task = self.task
        return TrainProgram(e.model, e.inner, e.train.steps, mesh, rows, task.row, task.loss)

    def _transfer(self, mesh: Mesh) -> FragmentTransfer:
        e = self.experiment
        shardings = parameter_shardings(e.model, mesh)
        transfer = FragmentTransfer(self.layout, shardings, e.outer.codec, e.outer.error_feedback)
        # Zeros, since the initial parameters would compile their generators anew for every mesh.
        transfer.compile(
            {
                name: jax.device_put(np.zeros(leaf.shape, leaf.dtype), shardings[name])
                for name, leaf in abstract_parameters(e.model).items()
            }
        )
        return transfer
