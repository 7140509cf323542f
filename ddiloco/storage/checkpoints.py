"""The global model on disk, by Orbax: its parameters, and the settings that are needed to use them."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from ddiloco.arrays.finite import NotFiniteError, check_finite
from ddiloco.outer.global_model import parameters_sha256
from ddiloco.settings.experiment import Experiment, parse, to_json
from ddiloco.settings.loop import LoopConfig
from ddiloco.storage.array_file import make_durable
from ddiloco.training.parameters import parameter_shapes

_ITEMS = ("params", "metadata")


class CheckpointError(Exception):
    """A checkpoint is missing or unusable; the message is one line."""


class Checkpoint(NamedTuple):
    """A restored global model."""

    step: int
    experiment: Experiment
    params: dict[str, np.ndarray]
    eval_loss: float | None


def save(
    directory: pathlib.Path,
    step: int,
    experiment: Experiment,
    params: Mapping[str, np.ndarray],
    eval_loss: float | None,
) -> None:
    """Writes the global model as `directory/step`, replacing an older one; returns when it is durable.

    One that is not finite is refused, as by `restore`.

    Of other steps the newest is kept: a syncer that is preempted again and again leaves a model each time.

    Raises:
      CheckpointError: the disk refuses, or it is not finite; the checkpoints of other steps stand.
    """
    new, written = directory / ".new", directory / str(step)
    try:
        check_finite(params.items())
    except NotFiniteError as error:
        raise CheckpointError(f"{written}: is not written: {error}") from None
    metadata = {
        "experiment": to_json(experiment),
        "params_sha256": parameters_sha256(params),
        "eval_loss": eval_loss,
    }
    items = ocp.args.Composite(
        params=ocp.args.StandardSave(dict(params)), metadata=ocp.args.JsonSave(metadata)
    )
    try:
        _complete(directory)
        shutil.rmtree(new, ignore_errors=True)  # what a kill has left: a whole model
        with _manager(new, create=True) as manager:
            manager.save(step, args=items)
        for path in new.rglob("*"):
            make_durable(path)
        if written.exists():
            written.rename(new / "before")
        (new / written.name).rename(written)
        make_durable(directory)
        shutil.rmtree(new, ignore_errors=True)
        with contextlib.suppress(OSError), _manager(directory, create=False) as manager:
            for old in sorted(set(manager.all_steps()) - {step})[:-1]:
                manager.delete(old)
    except Exception as error:  # Orbax raises many kinds where a disk is full
        raise CheckpointError(f"{directory / str(step)}: cannot be written: {_reason(error)}") from error


def newest(directory: pathlib.Path) -> int | None:
    """The step of the newest checkpoint in a folder of them; None: it holds none, or is not there."""
    if not directory.is_dir():
        return None
    with _manager(directory, create=False) as manager:
        return manager.latest_step()


def restore(directory: pathlib.Path) -> Checkpoint:
    """Reads `directory`: one checkpoint, or the newest in a folder of them, such as a run's.

    Raises:
      CheckpointError: there is none, or its parameters are not the ones that were saved, or not finite.
    """
    directory = pathlib.Path(directory).resolve()
    if directory.name.isdigit() and (directory / "params").is_dir():
        folder, step = directory.parent, int(directory.name)
    else:
        of_run = directory / "checkpoints"
        folder, step = of_run if of_run.is_dir() else directory, None
    if not folder.is_dir():
        raise CheckpointError(f"{directory}: no such folder of checkpoints")
    with _manager(folder, create=False) as manager:
        step = manager.latest_step() if step is None else step
        if step is None:
            raise CheckpointError(f"{folder}: holds no checkpoint")
        try:
            return _read(manager, step)
        except CheckpointError:
            raise
        except Exception as error:  # Orbax raises many kinds for a damaged file
            raise CheckpointError(f"{folder / str(step)}: cannot be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Orbax's error in one line; for a full disk only that it is full."""
    said = str(error) or type(error).__name__
    full = os.strerror(errno.ENOSPC)
    return full if full in said else said.splitlines()[0]


def _read(manager: ocp.CheckpointManager, step: int) -> Checkpoint:
    metadata = manager.restore(step, args=ocp.args.Composite(metadata=ocp.args.JsonRestore())).metadata
    experiment = parse(metadata["experiment"])
    loop = isinstance(experiment.model, LoopConfig)
    shapes = {} if loop else parameter_shapes(experiment.model)
    wanted = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()} or None
    params: dict[str, Any] = manager.restore(
        step, args=ocp.args.Composite(params=ocp.args.StandardRestore(wanted))
    ).params
    params = {name: np.asarray(params[name]) for name in sorted(params)}
    if parameters_sha256(params) != metadata["params_sha256"]:
        raise CheckpointError(
            f"checkpoint {step}: its parameters are not the ones that were saved (sha256 differs)"
        )
    try:
        check_finite(params.items())
    except NotFiniteError as error:
        raise CheckpointError(f"{manager.directory / str(step)}: {error}") from None
    return Checkpoint(step, experiment, params, metadata["eval_loss"])


def _complete(directory: pathlib.Path) -> None:
    """Restores a checkpoint after a kill between the two renames of `save`."""
    new = directory / ".new"
    for path in new.glob("[0-9]*") if (new / "before").exists() else ():
        with contextlib.suppress(OSError):
            path.rename(directory / path.name)


@contextlib.contextmanager
def _manager(directory: pathlib.Path, create: bool) -> Iterator[ocp.CheckpointManager]:
    """Orbax's, of the folder; it takes square brackets in a path for a pattern, so its path has none."""
    if not create:
        _complete(directory)
    options = ocp.CheckpointManagerOptions(create=create, enable_async_checkpointing=False)
    with contextlib.ExitStack() as stack:
        path = pathlib.Path(directory).resolve()
        if glob.has_magic(str(path)) or "\\" in str(path):
            if create:
                path.mkdir(parents=True, exist_ok=True)
            link = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()), "folder")
            link.symlink_to(path, target_is_directory=True)
            path = link
        yield stack.enter_context(ocp.CheckpointManager(path, options=options, item_names=_ITEMS))
