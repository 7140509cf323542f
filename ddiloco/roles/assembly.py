"""The parts of a run, from its settings and its recipe: layout, meshes, and what each learner works with."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from ddiloco.config import ConfigError
from ddiloco.outer.fragments import FragmentLayout, fragment
from ddiloco.roles.learner_arrays import Batches, Equipment, Program
from ddiloco.roles.transfer import FragmentTransfer
from ddiloco.settings.experiment import BASELINES, Experiment
from ddiloco.training.mesh import MeshConfig, carve

if TYPE_CHECKING:
    from ddiloco.training.evaluation import Score

Scorer = Callable[[Mapping[str, Any]], "Score | None"]


class Recipe(Protocol):
    """What a run trains: a built-in model, or a loop of one's own. All that a driver knows of either.

    Learners of one kind share their program where they share their mesh.
    """

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every parameter, by name."""

    def initial_parameters(self) -> dict[str, np.ndarray]:
        """The parameters at step 0, float32 on the host: the same in every process."""

    def kind(self, shards: Sequence[int]) -> Hashable:
        """What those who step on these shards must have in common with others to share a program."""

    def check(self, mesh: Mesh, shards: Sequence[int]) -> None:
        """Finds what cannot work for who steps on these shards.

        Raises:
          ConfigError, DataError: it cannot.
        """

    def check_scoring(self) -> None:
        """Finds what cannot work where the global model is scored; raises as `check` does."""

    def shardings(self, mesh: Mesh, kind: Hashable) -> Mapping[str, Sharding]:
        """Where each parameter lies on the mesh."""

    def program(self, mesh: Mesh, kind: Hashable) -> Program:
        """The compiled step."""

    def batches(self, shards: Sequence[int]) -> Batches:
        """The training batches of these shards, from their beginning."""

    def scorer(self, mesh: Mesh) -> Scorer:
        """A function from parameters, on host or devices, to their score; None where nothing scores."""

    def sample(self, params: Mapping[str, Any]) -> str | None:
        """What is shown at the end; None: nothing."""


class Assembly:
    """Makes the parts of a run and shares what learners on the same mesh can share."""

    def __init__(self, experiment: Experiment, recipe: Recipe) -> None:
        self.experiment, self.recipe = experiment, recipe
        self.initial_parameters = recipe.initial_parameters
        self.batches, self.scorer = recipe.batches, recipe.scorer

    @functools.cached_property
    def layout(self) -> FragmentLayout:
        """How the parameters are cut into fragments; allocates nothing.

        Raises:
          ConfigError: there are fewer pieces than there are to be fragments.
        """
        sync, outer = self.experiment.sync, self.experiment.outer
        try:
            return fragment(
                self.recipe.shapes, sync.num_fragments, outer.fragmentation, split_large=outer.split_large
            )
        except ValueError as error:
            raise ConfigError(f"config.sync.num_fragments: {error}") from None

    def learner_meshes(self) -> list[Mesh]:
        """One mesh for each learner."""
        return carve(jax.devices(), self.experiment.sync.num_learners, self.experiment.mesh)

    def jobs(self) -> list[tuple[Mesh, tuple[int, ...]]]:
        """Mesh and shards of all that steps: of each learner, or of the one job of a baseline."""
        learners = range(self.experiment.sync.num_learners)
        if self.experiment.algorithm not in BASELINES:
            return [(mesh, (m,)) for m, mesh in enumerate(self.learner_meshes())]
        shards = (0,) if self.experiment.algorithm == "lone_learner" else tuple(learners)
        return [(self.own_mesh(), shards)]

    def check(self) -> None:
        """Finds what cannot work, before anything is compiled.

        Raises:
          ConfigError: fragments, mesh and rows do not fit each other or the devices here.
          DataError: the data set cannot be opened, or has too little in a split.
        """
        if self.experiment.algorithm not in BASELINES:
            _ = self.layout
        for mesh, shards in self.jobs():
            self.recipe.check(mesh, shards)
        self.recipe.check_scoring()

    def check_learner(self, learner: int) -> None:
        """Finds what cannot work in a process that is this one learner; raises as `check` does."""
        _ = self.layout
        self.recipe.check(self.own_mesh(), (learner,))

    def check_syncer(self) -> None:
        """Finds what cannot work in a process that is the syncer; raises as `check` does."""
        _ = self.layout
        self.recipe.check_scoring()

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
        keys = [(mesh, self.recipe.kind((m,))) for m, mesh in enumerate(self.learner_meshes())]
        lying = [_lying(self.recipe.shardings(*key)) for key in keys]
        with concurrent.futures.ThreadPoolExecutor(max_workers=8) as pool:
            programs = dict(
                zip(dict.fromkeys(keys), pool.map(self._program, dict.fromkeys(keys)), strict=True)
            )
            transfers = dict(
                zip(dict.fromkeys(lying), pool.map(self._transfer, dict.fromkeys(lying)), strict=True)
            )
        parts = zip(keys, lying, strict=True)
        return [self._equipment(m, programs[key], transfers[laid]) for m, (key, laid) in enumerate(parts)]

    def own_equipment(self, learner: int) -> Equipment:
        """What the one learner of this process works with, compiled."""
        key = self.own_mesh(), self.recipe.kind((learner,))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:  # loading what is in the cache holds no lock
            program = pool.submit(self._program, key)
            transfer = self._transfer(_lying(self.recipe.shardings(*key)))
        return self._equipment(learner, program.result(), transfer)

    def reassigned(self, equipment: Equipment, learner: int) -> Equipment:
        """The same programs for another learner of the same kind."""
        return self._equipment(learner, equipment.program, equipment.transfer)

    def program(self, mesh: Mesh, shards: Sequence[int]) -> Program:
        """The compiled step of who trains on these shards."""
        return self._program((mesh, self.recipe.kind(shards)))

    def _equipment(self, learner: int, program: Program, transfer: FragmentTransfer) -> Equipment:
        e = self.experiment
        return Equipment(
            program=program,
            transfer=transfer,
            batches=self.batches((learner,)),
            steps_in_flight=e.train.steps_in_flight,
            min_step_seconds=e.min_step_seconds(learner),
            sdc_check_every=e.sdc_check_every,
        )

    def _program(self, key: tuple[Mesh, Hashable]) -> Program:
        return self.recipe.program(*key)

    def _transfer(self, lying: tuple[tuple[str, Sharding], ...]) -> FragmentTransfer:
        outer, shardings = self.experiment.outer, dict(lying)
        transfer = FragmentTransfer(self.layout, shardings, outer.codec, outer.error_feedback)
        # Zeros, since the initial parameters would compile their generators anew for every mesh.
        transfer.compile(
            {
                name: jax.device_put(np.zeros(shape, np.float32), shardings[name])
                for name, shape in self.layout.shapes
            }
        )
        return transfer


def _lying(shardings: Mapping[str, Sharding]) -> tuple[tuple[str, Sharding], ...]:
    return tuple(shardings.items())
