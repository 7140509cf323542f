"""The recipe of a run, from its settings: a built-in model on its task's data, or the user's loop."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import pathlib
import sys
import threading
import types
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from ddiloco.arrays.blocks import needed
from ddiloco.arrays.finite import NotFiniteError, check_finite
from ddiloco.config import ConfigError
from ddiloco.data.host_batches import HostBatches, shards_of_rows
from ddiloco.outer.stacks import array_of
from ddiloco.settings.experiment import Experiment, task_of, with_steps_of_tokens
from ddiloco.settings.loop import LoopConfig
from ddiloco.training.evaluation import Score, evaluate, make_eval_step
from ddiloco.training.loop import Loop, MakeLoop, Place
from ddiloco.training.loop_program import ConcatenatedBatches, HostLoopBatches, LoopBatches, LoopProgram
from ddiloco.training.loss import Batch, LossSums
from ddiloco.training.mesh import MeshConfig, carve
from ddiloco.training.parameters import Parameters, parameter_shapes, sampled_parameters
from ddiloco.training.program import TrainProgram
from ddiloco.training.sharding import (
    batch_sharding,
    check_context,
    check_divided,
    check_stages,
    parameter_shardings,
    rows_divisor,
)
from ddiloco.workers.assembly import Assembly, Between, Recipe, Scorer
from ddiloco.workers.learner_arrays import BatchSource

if TYPE_CHECKING:
    from ddiloco.weights.initial import InitialWeights


def assembly_of(
    experiment: Experiment,
    make_loop: MakeLoop | None = None,
    share: int = 1,
    num_devices: int | None = None,
) -> Assembly:
    """The parts of a run. `make_loop`: makes its loop; None: what the settings name.

    `share`, `num_devices`: as an Assembly's. With one host in so many a step has the same rows, in so many
    times more micro-batches: none is larger than with all hosts.

    Raises:
      ConfigError: the factory that the settings name cannot be used.
    """
    if isinstance(experiment.model, LoopConfig):
        make = make_loop or load_factory(experiment.model.factory)
        return Assembly(experiment, LoopRecipe(experiment, make))
    inner = dataclasses.replace(experiment.inner, accumulation=experiment.inner.accumulation * share)
    recipe = ModelRecipe(dataclasses.replace(experiment, inner=inner))
    return Assembly(experiment, recipe, share, num_devices)


def with_steps_of_budget(experiment: Experiment, make_loop: MakeLoop | None = None) -> Experiment:
    """The experiment with `train.steps` set by its budget of tokens, if any.

    Raises:
      ConfigError: it is for a loop that does not say its `step_tokens`.
    """
    if experiment.train.tokens is None or not isinstance(experiment.model, LoopConfig):
        return with_steps_of_tokens(experiment)
    recipe: Any = assembly_of(experiment, make_loop).recipe
    if recipe.step_tokens is None:
        problem = f"is {experiment.train.tokens}, but the loop does not say its step_tokens"
        raise ConfigError(f"config.train.tokens: {problem}")
    return with_steps_of_tokens(experiment, recipe.step_tokens)


class ModelRecipe(Recipe):
    """The `Recipe` of a built-in model, its task and the inner optimizer."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment, self._task = experiment, task_of(experiment)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every parameter, by name; allocates nothing."""
        return parameter_shapes(self._experiment.model)

    def initial_parameters(self) -> Mapping[str, np.ndarray]:
        """The parameters at step 0, on the host: of model and seed alone, or as `init_from` has them."""
        e = self._experiment
        if (weights := self._initial_weights()) is not None:
            return weights
        # One after the other: all of a large model need not fit on one device.
        return {name: np.asarray(value) for name, value in sampled_parameters(e.model, e.seed)}

    def _initial_weights(self) -> InitialWeights | None:
        e = self._experiment
        if e.init_from is None:
            return None
        from ddiloco.weights.initial import InitialWeights

        return InitialWeights(e.model, pathlib.Path(e.init_from).expanduser())

    def kind(self, shards: Sequence[int]) -> int:
        """The number of rows of one step."""
        return sum(self._experiment.batch_size(shard) for shard in shards)

    def check(self, mesh: Mesh, shards: Sequence[int]) -> None:
        """Checks rows and parameters, and that these shards have data."""
        self.check_fit(mesh, self.kind(shards))
        self.batches(shards)

    @property
    def scores(self) -> bool:
        """Whether training devices score held-out rows; False: an evaluator does, or evaluation is off."""
        return self._experiment.eval.every is not None and self._experiment.driver != "remote"

    def check_fit(self, mesh: Mesh, rows: int) -> None:
        """Raises ConfigError if rows or parameters do not divide: a step's rows also into micro-batches."""
        e = self._experiment
        ways, parts = rows_divisor(mesh), e.inner.accumulation
        held_out = {"eval.batch_size": e.eval.batch_size} if self.scores else {}
        for name, count in {"train.batch_size": rows, **held_out}.items():
            if count % ways:
                raise ConfigError(
                    f"config.{name}: gives {count} rows, but must give a multiple of {ways}, "
                    "the devices that share them"
                )
        shared = ways if mesh.shape["stage"] == 1 else 1  # of stages below
        if rows % (parts * shared):
            problem = f"is {parts}, but a step has {rows} rows, which is no multiple of it times {shared}"
            raise ConfigError(f"config.inner.accumulation: {problem}, the devices that share them")
        platform = mesh.devices.flat[0].platform
        if getattr(e.model, "attention", None) == "cudnn" and platform != "gpu":
            raise ConfigError(f"config.model.attention: is cudnn, which needs a GPU; here are {platform}s")
        check_stages(e.model, mesh, {"train.batch_size": rows // parts, **held_out})
        check_context(e.model, mesh, rows // parts)
        check_divided(e.model, mesh)

    def check_beginning(self) -> None:
        """Reads the weights that training begins from once, if there are any, before anything is written."""
        if (weights := self._initial_weights()) is not None:
            weights.check()

    def warnings(self) -> Sequence[str]:
        """Those of the task; () where only the learners' processes have its files."""
        try:
            return self._task.warnings()
        except ConfigError:
            return ()

    def check_scoring(self) -> None:
        """Opens the held-out data."""
        _ = self._held_out

    def shardings(self, mesh: Mesh, kind: Hashable) -> Mapping[str, Sharding]:
        """By the names of the parameters' axes."""
        del kind
        return parameter_shardings(self._experiment.model, mesh)

    def program(self, mesh: Mesh, kind: int) -> TrainProgram:
        """The inner step of `kind` rows, compiled."""
        e, task, saved = self._experiment, self._task, self._experiment.train.executable
        wanted = e.model, e.inner, mesh, kind, tuple(task.row.items()), task.loss
        program = _program(*wanted) if saved is None else TrainProgram(*wanted, saved)
        return program.of_run(e.train.steps)

    def step_flops(self, kind: int) -> float:
        """By the model's own formula, for `kind` rows."""
        return self._task.step_flops(kind)

    def batches(self, shards: Sequence[int]) -> BatchSource:
        """The training batches of these learners' shards of the data."""
        e = self._experiment
        return self._task.batches(e.data_shards(shards), e.num_data_shards, self.kind(shards))

    def host_batches(self, learner: int, mesh: Mesh) -> HostBatches:
        """Of the learner's training batches, what this process's devices on the mesh need."""
        e, rows = self._experiment, self.kind((learner,))
        shards = e.data_shards((learner,))
        own = shards_of_rows(needed(batch_sharding(mesh), (rows,)).boxes, shards, rows)
        read = self._task.batches(own, e.num_data_shards, rows // len(shards) * len(own))
        return HostBatches(read, own, shards, rows)

    def global_shardings(self, mesh: Mesh) -> Mapping[str, Sharding]:
        """By the names of the parameters' axes."""
        return parameter_shardings(self._experiment.model, mesh)

    def scorer(self, mesh: Mesh, between: Between) -> Scorer:
        """Scores parameters on the held-out batches, a batch at a time."""
        e, batches = self._experiment, self._held_out
        step = make_eval_step(e.model, mesh, self._task.loss)
        shardings = parameter_shardings(e.model, mesh)

        def of_batch(params: Parameters, batch: Batch) -> LossSums:
            return between(lambda: step(params, batch))

        def score(params: Mapping[str, Any]) -> Score:
            laid = shardings.items()
            placed = {name: jax.device_put(array_of(name, params), sharding) for name, sharding in laid}
            return evaluate(e.model, of_batch, placed, batches, mesh)

        return score

    @property
    def samples(self) -> bool:
        """Whether the settings ask for a sample."""
        return self._task.samples

    def sample(self, params: Mapping[str, Any]) -> str | None:
        """What the model predicts for unseen data."""
        return self._task.sample(params)

    @functools.cached_property
    def _held_out(self) -> list[dict[str, np.ndarray]]:
        """The held-out batches, the same for every run on this data."""
        e = self._experiment
        return self._task.held_out(e.eval.batch_size, e.eval.num_batches)


# It keeps no array, so that all runs of a process that train alike share it.
_program = functools.lru_cache(maxsize=16)(TrainProgram)


class LoopRecipe(Recipe):
    """The `Recipe` of the user's own loop: one for each learner, and another that scores the global model.

    What is not here a loop has not. It is made to find the shapes, so that its scoring needs no check; its
    operations only it knows; its `evaluate` gets host arrays; and there is no sample.
    """

    def __init__(self, experiment: Experiment, make_loop: MakeLoop) -> None:
        self._experiment, self._make_loop = experiment, make_loop
        self._programs: dict[tuple[Mesh, tuple[int, ...]], LoopProgram] = {}
        self._making = threading.Lock()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._global.shapes

    def initial_parameters(self) -> dict[str, np.ndarray]:
        """The parameters that `init` gives, or a file; raises ConfigError if one is not finite."""
        path = self._experiment.init_from
        if path is not None:
            from ddiloco.weights.initial import named_parameters

            return named_parameters(self.shapes, pathlib.Path(path).expanduser())
        params = self._global.initial_parameters()
        try:
            check_finite(params.items())
        except NotFiniteError as error:
            raise ConfigError(f"loop.init: {error}") from None
        return params

    def check_beginning(self) -> None:
        """Reads the file that training begins from, if there is one."""
        if self._experiment.init_from is not None:
            self.initial_parameters()

    @property
    def step_tokens(self) -> int | None:
        """What the loop says of itself."""
        return self._global.loop.step_tokens

    def kind(self, shards: Sequence[int]) -> tuple[int, ...]:
        """The learners' numbers, since every learner has its own loop."""
        return tuple(shards)

    def check(self, mesh: Mesh, shards: Sequence[int]) -> None:
        """Makes and compiles the learner's loop."""
        self.program(mesh, self.kind(shards))

    def shardings(self, mesh: Mesh, kind: tuple[int, ...]) -> Mapping[str, Sharding]:
        """Where `init` puts the parameters."""
        return self.program(mesh, kind).shardings

    def program(self, mesh: Mesh, kind: tuple[int, ...]) -> LoopProgram:
        """The learner's loop, compiled; raises ConfigError if it is not as the syncer's, or invalid."""
        with self._making:
            if (mesh, kind) not in self._programs:
                program = self.uncompiled(mesh, kind[0])
                _check_shapes(program.shapes, self.shapes, kind[0])
                program.compile([self._loop(self._place(m, mesh)) for m in kind[1:]])
                self._programs[mesh, kind] = program
            return self._programs[mesh, kind]

    def uncompiled(self, mesh: Mesh, learner: int) -> LoopProgram:
        """The learner's loop as it is made."""
        place = self._place(learner, mesh)
        return LoopProgram(self._loop(place), place)

    def batches(self, shards: Sequence[int]) -> BatchSource:
        """The batches of these learners' loops, which may lie on the mesh that their program is for."""
        meshes = (mesh for mesh, kind in list(self._programs) if kind == tuple(shards))
        mesh = next(meshes, self._one_device)
        places = [self._place(learner, mesh) for learner in shards]
        each = [LoopBatches(self._loop(place), place) for place in places]
        return each[0] if len(each) == 1 else ConcatenatedBatches(each)

    def host_batches(self, learner: int, mesh: Mesh) -> HostLoopBatches:
        """The batches of the learner's loop, as this host of several makes them."""
        program, place = self.program(mesh, (learner,)), self._place(learner, mesh)
        return HostLoopBatches(LoopBatches(self._loop(place), place), program.tokens, jax.process_index())

    def scorer(self, mesh: Mesh, between: Between) -> Scorer:
        """Scores parameters with the loop's `evaluate`, if it has one."""
        del mesh, between
        program = self._global

        def score(params: Mapping[str, Any]) -> Score | None:
            found = program.loop.evaluate
            return None if found is None else Score(float(found(program.tree(params))))

        return score

    samples = False

    def tree(self, params: Mapping[str, Any]) -> Any:
        """The parameters, given by name, in the tree that the loop's `params` has."""
        return self._global.tree(params)

    @functools.cached_property
    def _global(self) -> LoopProgram:
        return self.uncompiled(self._one_device, 0)

    @property
    def _one_device(self) -> Mesh:
        return carve(jax.local_devices()[-1:], 1, MeshConfig())[0]

    def _place(self, learner: int, mesh: Mesh) -> Place:
        return Place(learner, self._experiment.max_learners, self._experiment.seed, mesh)

    def _loop(self, place: Place) -> Loop:
        settings = self._experiment.model.settings
        try:
            inspect.signature(self._make_loop).bind(place, **settings)
        except TypeError as error:
            name = getattr(self._make_loop, "__name__", self._experiment.model.factory)
            raise ConfigError(f"config.model.settings: do not fit {name}: {error}") from None
        except ValueError:  # of a callable that does not say what it takes
            pass
        loop = self._make_loop(place, **settings)
        if not isinstance(loop, Loop):
            problem = f"gives {type(loop).__name__}, but must give a ddiloco.Loop"
            raise ConfigError(f"config.model.factory: {self._experiment.model.factory} {problem}")
        return loop


def load_factory(name: str) -> MakeLoop:
    """What `module:function` or `file.py:function` names; raises ConfigError if it cannot be imported."""
    where, _, function = name.rpartition(":")
    try:
        if where == "__main__":
            raise ImportError("it is made in this process alone; put it into a file")
        module = _load_file(pathlib.Path(where)) if where.endswith(".py") else importlib.import_module(where)
        make = functools.reduce(getattr, function.split("."), module)
    except (ImportError, OSError, AttributeError) as error:
        problem = f"{name} cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"config.model.factory: {problem}") from error
    if not callable(make):
        raise ConfigError(f"config.model.factory: {name} is no function, but must make a ddiloco.Loop")
    return make


def _load_file(path: pathlib.Path) -> types.ModuleType:
    """A Python file as a module."""
    spec = importlib.util.spec_from_file_location(f"loop_of_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _check_shapes(own: Mapping[str, Any], wanted: Mapping[str, Any], learner: int) -> None:
    for name in sorted({*own, *wanted}):
        if own.get(name) != wanted.get(name):
            shapes = (
                f"learner {learner} has {name} of shape {own.get(name)}, the syncer of {wanted.get(name)}"
            )
            raise ConfigError(f"loop.params: {shapes}; every loop of a run must have the same parameters")
