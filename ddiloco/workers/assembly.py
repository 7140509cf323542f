"""Makes the parts of a run from its settings and its recipe: layout, meshes, and each learner's equipment."""

from __future__ import annotations

import concurrent.futures
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from ddiloco.arrays.blocks import placed
from ddiloco.config import ConfigError
from ddiloco.outer.encoding import FragmentDecoder
from ddiloco.outer.fragments import FragmentLayout, fragment
from ddiloco.outer.global_model import GlobalModel
from ddiloco.outer.stacks import array_of, array_shape
from ddiloco.settings.experiment import BASELINES, Experiment, step_tokens
from ddiloco.training import chips
from ddiloco.training.mesh import MeshConfig, carve
from ddiloco.workers.learner_arrays import BatchSource, Equipment, Program
from ddiloco.workers.transfer import FragmentTransfer

if TYPE_CHECKING:
    from ddiloco.training.evaluation import Score

Scorer = Callable[[Mapping[str, Any]], "Score | None"]
Between = Callable[[Callable[[], Any]], Any]
"""Makes a call while the devices run no learner's step, and returns its result."""


def at_once(call: Callable[[], Any]) -> Any:
    """The result of the call, with exclusive use of the devices."""
    return call()


class Recipe(Protocol):
    """A run's model, loss and data: a built-in model, or the user's own loop; all that drivers know of it.

    Learners of the same kind on the same mesh share a program.
    """

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every parameter, by name."""

    def initial_parameters(self) -> Mapping[str, np.ndarray]:
        """The parameters at step 0, float32 on the host: the same in every process that asks."""

    def check_beginning(self) -> None:
        """Checks that there are initial parameters.

        Raises:
          ConfigError: there are none.
        """

    def kind(self, shards: Sequence[int]) -> Hashable:
        """The kind of a job that trains on these shards; jobs of one kind can share a program."""

    def check(self, mesh: Mesh, shards: Sequence[int]) -> None:
        """Checks that a job can train on these shards on this mesh.

        Raises:
          ConfigError, DataError: it cannot.
        """

    def warnings(self) -> Sequence[str]:
        """Possible problems of the checked data, a sentence each; () if unknown."""
        return ()

    def check_scoring(self) -> None:
        """Checks that the global model can be scored; raises as `check` does."""

    def shardings(self, mesh: Mesh, kind: Hashable) -> Mapping[str, Sharding]:
        """Sharding of each parameter on the mesh."""

    def program(self, mesh: Mesh, kind: Hashable) -> Program:
        """The compiled step."""

    def step_flops(self, kind: Hashable) -> float | None:
        """The model's operations in one step; None: not known."""

    def batches(self, shards: Sequence[int]) -> BatchSource:
        """The training batches of these shards, from the first on."""

    def host_batches(self, learner: int, mesh: Mesh) -> BatchSource:
        """The learner's training batches, of each the part for this process's devices."""

    def global_shardings(self, mesh: Mesh) -> Mapping[str, Sharding] | None:
        """Sharding of parameters for scores and samples; None: on the host."""

    def scorer(self, mesh: Mesh, between: Between) -> Scorer:
        """A function from parameters, on host or devices, to their score, or to None if there is no score.

        All its calls of the devices go through `between`.
        """

    @property
    def samples(self) -> bool:
        """Whether the task has a sample."""

    def sample(self, params: Mapping[str, Any]) -> str | None:
        """The sample shown at the end of a run; None: there is none."""


class Assembly:
    """Makes the parts of a run; learners on the same mesh share what they can."""

    def __init__(
        self, experiment: Experiment, recipe: Recipe, share: int = 1, num_devices: int | None = None
    ) -> None:
        """`share`: one in so many of the hosts of this process's learner is there.

        `num_devices`: that are this process's only learner's, the first ones; None: all.
        """
        self.experiment, self.recipe = experiment, recipe
        self._share, self._num_devices = share, num_devices
        self.initial_parameters = recipe.initial_parameters
        self.batches = recipe.batches

    @functools.cached_property
    def layout(self) -> FragmentLayout:
        """The division of the parameters into fragments; allocates nothing.

        Raises:
          ConfigError: there are fewer pieces than fragments.
        """
        sync, outer = self.experiment.sync, self.experiment.outer
        shapes = self.recipe.shapes  # a loop without any raises by itself
        try:
            return fragment(shapes, sync.num_fragments, outer.fragmentation)
        except ValueError as error:
            raise ConfigError(f"config.sync.num_fragments: {error}") from None

    @property
    def num_params(self) -> int:
        """Parameters of the model."""
        return sum(map(math.prod, self.recipe.shapes.values()))

    def global_model(
        self, parameters: Mapping[str, np.ndarray], fragments: Sequence[int] | None = None
    ) -> GlobalModel:
        """The syncer's model, from these parameters; `fragments`: those of a shard, None: all."""
        e = self.experiment
        of_learners = e.max_learners, step_tokens(e)
        return GlobalModel(self.layout, parameters, e.outer, *of_learners, fragments, e.sync.rebase)

    def decoder(self) -> FragmentDecoder | None:
        """A decoder of updates that travel as differences; None: they travel whole."""
        codec = self.experiment.outer.update_codec
        return None if codec == "f32" else FragmentDecoder(self.layout, codec)

    def learner_meshes(self) -> list[Mesh]:
        """One mesh for each learner; raises ConfigError if evaluation leaves them no device."""
        devices, kept = jax.devices(), self.experiment.eval_devices
        if kept >= len(devices):
            problem = f"is {kept}, but must leave learners some of the {len(devices)} devices"
            raise ConfigError(f"config.eval.devices: {problem}")
        return carve(devices[: len(devices) - kept], self.experiment.sync.num_learners, self.experiment.mesh)

    def jobs(self) -> list[tuple[Mesh, tuple[int, ...]]]:
        """Mesh and shards of each learner, or of a baseline's one job."""
        learners = range(self.experiment.sync.num_learners)
        if self.experiment.algorithm not in BASELINES:
            return [(mesh, (m,)) for m, mesh in enumerate(self.learner_meshes())]
        shards = (0,) if self.experiment.algorithm == "lone_learner" else tuple(learners)
        return [(self.own_mesh(), shards)]

    def check(self, begins: bool = True) -> None:
        """Checks that the settings can work, before anything is compiled.

        `begins`: whether the run is new; a resumed one needs no initial parameters.

        Raises:
          ConfigError: fragments, mesh and rows do not fit each other or the devices here.
          DataError: the data set cannot be opened, or has too little in a split.
        """
        if self.experiment.algorithm not in BASELINES:
            _ = self.layout
        for mesh, shards in self.jobs():
            self.recipe.check(mesh, shards)
        if begins:
            self.recipe.check_beginning()
        self.check_evaluator()

    def check_learner(self, learner: int) -> None:
        """Like `check`, for a process that is this one learner."""
        _ = self.layout
        self.recipe.check(self.own_mesh(), (learner,))

    def check_syncer(self) -> None:
        """Like `check`, for a process that is the syncer; an evaluator's settings fail here already."""
        _ = self.layout
        self.recipe.check_beginning()
        self.check_evaluator()

    def check_evaluator(self) -> None:
        """Checks that the global model can be scored, if it is to be; raises as `check` does."""
        e = self.experiment
        if e.eval.every is None:
            return
        if e.eval_devices and e.eval.batch_size % e.eval_devices:
            problem = f"is {e.eval.devices}, but must divide the {e.eval.batch_size} rows of eval.batch_size"
            raise ConfigError(f"config.eval.devices: {problem}")
        self.recipe.check_scoring()

    def own_mesh(self) -> Mesh:
        """The mesh of this process's only learner: all devices that the process sees."""
        return carve(jax.devices()[: self._num_devices], 1, self.experiment.mesh)[0]

    def mesh_on(self, devices: Sequence[jax.Device]) -> Mesh:
        """The mesh for held-out rows: all of the devices, or one if they do not divide the rows."""
        count = len(devices) if self.experiment.eval.batch_size % len(devices) == 0 else 1
        return carve(devices[:count], 1, MeshConfig(data=1, fsdp=-1))[0]

    def evaluation_mesh(self) -> Mesh:
        """The mesh that scores the global model during training: devices kept for that, or idle ones.

        Without either, the devices of `evaluation_learner`; or the last device, if every learner has one
        device: a program on one device needs no collectives, and takes its turn among the learner's steps.
        """
        kept, learner = self.experiment.eval_devices, self.evaluation_learner()
        if kept:
            return self.mesh_on(jax.devices()[-kept:])
        if learner is not None:
            return self.learner_meshes()[learner]
        return self.mesh_on(self._idle() or jax.devices()[-1:])

    def evaluation_learner(self) -> int | None:
        """The learner between whose steps the global model is scored; None: it needs no gap between steps.

        On devices that a learner shares, the collectives of two threads could wait for each other forever.
        """
        meshes = self.learner_meshes()
        shared = meshes[-1].size > 1 and not self._idle()
        return len(meshes) - 1 if shared else None

    def _idle(self) -> list[jax.Device]:
        """The devices that no learner uses."""
        used = {device for mesh in self.learner_meshes() for device in mesh.devices.flat}
        return [device for device in jax.devices() if device not in used]

    def scorer(self, mesh: Mesh, between: Between = at_once) -> Scorer:
        """What scores parameters on the mesh; it gives None where evaluation is off."""
        if self.experiment.eval.every is None:
            return lambda params: None
        return self.recipe.scorer(mesh, between)

    def sample(self, params: Mapping[str, Any]) -> str | None:
        """A sample from these host parameters, on the devices of the first learner, which must be idle."""
        if not self.recipe.samples:
            return None
        laid = self.recipe.global_shardings(self.jobs()[0][0]).items()
        return self.recipe.sample({n: jax.device_put(array_of(n, params), sharding) for n, sharding in laid})

    def equipment(self) -> list[Equipment]:
        """The compiled equipment of each learner; different meshes are compiled in parallel."""
        keys = [(mesh, self.recipe.kind((m,))) for m, mesh in enumerate(self.learner_meshes())]
        placements = [(self._placement(key), self._codec(m)) for m, key in enumerate(keys)]
        with concurrent.futures.ThreadPoolExecutor(max_workers=8) as pool:
            programs = {key: pool.submit(self.recipe.program, *key) for key in dict.fromkeys(keys)}
            transfers = {at: pool.submit(self._transfer, *at) for at in dict.fromkeys(placements)}
        parts = zip(keys, placements, strict=True)
        return [
            self._equipment(m, programs[key].result(), transfers[at].result())
            for m, (key, at) in enumerate(parts)
        ]

    def own_equipment(self, learner: int, hosts: int = 1) -> Equipment:
        """The compiled equipment of this process's only learner; it may be one of the learner's `hosts`."""
        key = self.own_mesh(), self.recipe.kind((learner,))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:  # loading from the cache holds no lock
            program = pool.submit(self.recipe.program, *key)
            transfer = self._transfer(self._placement(key), self._codec(learner))
        batches = self.recipe.host_batches(learner, key[0]) if hosts > 1 else None
        return self._equipment(learner, program.result(), transfer, batches)

    def reassigned(self, equipment: Equipment, learner: int) -> Equipment:
        """The same programs for another learner of the same kind."""
        key = equipment.program.mesh, self.recipe.kind((learner,))
        transfer = self._transfer(self._placement(key), self._codec(learner))  # compiled for its codec
        return self._equipment(learner, equipment.program, transfer)

    def program(self, mesh: Mesh, shards: Sequence[int]) -> Program:
        """The compiled step of a job that trains on these shards."""
        return self.recipe.program(mesh, self.recipe.kind(shards))

    def peak_flops(self, mesh: Mesh) -> float | None:
        """Operations a second of all its devices, by the settings or their kind; None: unknown."""
        device: jax.Device = mesh.devices.flat[0]
        peak = self.experiment.log.peak_flops or chips.peak_flops(device.device_kind)
        return None if peak is None else peak * mesh.size

    def _equipment(
        self, learner: int, program: Program, transfer: FragmentTransfer, batches: BatchSource | None = None
    ) -> Equipment:
        e = self.experiment
        return Equipment(
            program=program,
            transfer=transfer,
            batches=batches or self.batches((learner,)),
            min_step_seconds=e.min_step_seconds(learner),
            verify_every=e.train.verify_every,
            step_flops=self.recipe.step_flops(self.recipe.kind((learner,))),
            peak_flops=self.peak_flops(program.mesh),
            share=self._share,
        )

    def _placement(self, key: tuple[Mesh, Hashable]) -> tuple[tuple[str, Sharding], ...]:
        return tuple(self.recipe.shardings(*key).items())

    def _codec(self, learner: int) -> str:
        return self.experiment.outer.codec_of(learner)

    def _transfer(self, placement: tuple[tuple[str, Sharding], ...], codec: str) -> FragmentTransfer:
        outer, rebase = self.experiment.outer, self.experiment.sync.rebase
        feedback = outer.with_codec(codec).error_feedback
        return _compiled_transfer(self.layout, placement, codec, feedback, rebase, not outer.all_exact)


@functools.lru_cache(maxsize=16)  # it keeps no array, so that all runs of a process share it
def _compiled_transfer(
    layout: FragmentLayout,
    placement: tuple[tuple[str, Sharding], ...],
    codec: str,
    error_feedback: bool,
    rebase: bool,
    gradients: bool,
) -> FragmentTransfer:
    shardings, shapes = dict(placement), dict(layout.shapes)
    transfer = FragmentTransfer(layout, shardings, codec, error_feedback, rebase, gradients)
    # Zeros, since making initial parameters would compile their generators for every mesh.
    zeros = [np.zeros(array_shape(name, shapes), np.float32) for name in shardings]
    transfer.compile(dict(zip(shardings, placed(zeros, tuple(shardings.values())), strict=True)))
    return transfer
