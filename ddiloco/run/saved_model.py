"""The global model that a run has left in its workdir."""

from __future__ import annotations

import contextlib
import json
import pathlib
import threading
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ddiloco.config import ConfigError
from ddiloco.outer.fragments import assemble
from ddiloco.run.recipes import assembly_of
from ddiloco.settings.experiment import Experiment, parse
from ddiloco.storage import checkpoints, run_mark
from ddiloco.storage.checkpoints import CheckpointError
from ddiloco.storage.durable import FOLDER, DurableState, DurableStateError


class SavedModel(NamedTuple):
    """Parameters by layer, their global step, and the settings of their run."""

    experiment: Experiment
    params: Mapping[str, np.ndarray]
    step: int


def saved_model(workdir: pathlib.Path) -> SavedModel:
    """The newest checkpoint, or what a syncer has made durable if that is of a later step.

    A run that goes on after it was interrupted has a checkpoint of then.

    Raises:
      ConfigError: there is neither.
    """
    try:
        mark, step = run_mark.begun(workdir / FOLDER), checkpoints.newest(workdir / "checkpoints")
        if mark is not None:
            with contextlib.suppress(*(() if step is None else (DurableStateError,))):
                durable = durable_model(workdir, mark.run)
                if step is None or step < durable.step:
                    return durable
        found = checkpoints.restore(workdir / "checkpoints")
        return SavedModel(found.experiment, found.params, found.step)
    except (CheckpointError, DurableStateError, run_mark.RunMarkError) as error:
        raise ConfigError(f"workdir: {error}") from None


def durable_model(workdir: pathlib.Path, run: str) -> SavedModel:
    """What the syncer has made durable; raises DurableStateError and OSError."""
    experiment = parse(json.loads((workdir / "config.json").read_text()))
    layout = assembly_of(experiment).layout
    durable = DurableState(workdir / FOLDER, layout, lambda record: None, threading.Event(), run)
    found = [durable.fragment(p) for p in range(layout.num_fragments)]
    params = assemble(layout, [fragment.pieces for fragment, _, _ in found])
    return SavedModel(experiment, params, max(step for _, step, _ in found))
