"""The global model that a run has left in its workdir."""

from __future__ import annotations

import json
import pathlib
import threading
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ddiloco.config import ConfigError
from ddiloco.disk import checkpoints, run_mark
from ddiloco.disk.checkpoints import CheckpointError
from ddiloco.disk.durable import FOLDER, DurableState, DurableStateError
from ddiloco.outer.fragments import assemble
from ddiloco.run.recipes import assembly_of
from ddiloco.settings.experiment import Experiment, parse


class SavedModel(NamedTuple):
    """Parameters by layer, of which step they are, and the settings of their run."""

    experiment: Experiment
    params: Mapping[str, np.ndarray]
    step: int


def saved_model(workdir: pathlib.Path) -> SavedModel:
    """The newest checkpoint, else what a syncer has made durable; raises ConfigError if there is neither."""
    try:
        mark = run_mark.begun(workdir / FOLDER)
        if mark is not None and checkpoints.newest(workdir / "checkpoints") is None:
            return _durable(workdir, mark.run)
        found = checkpoints.restore(workdir / "checkpoints")
        return SavedModel(found.experiment, found.params, found.step)
    except (CheckpointError, DurableStateError, run_mark.RunMarkError) as error:
        raise ConfigError(f"workdir: {error}") from None


def _durable(workdir: pathlib.Path, run: str) -> SavedModel:
    experiment = parse(json.loads((workdir / "config.json").read_text()))
    layout = assembly_of(experiment).layout
    durable = DurableState(workdir / FOLDER, layout, lambda record: None, threading.Event(), run)
    found = [durable.fragment(p) for p in range(layout.num_fragments)]
    params = assemble(layout, [fragment.pieces for fragment, _, _ in found])
    return SavedModel(experiment, params, max(step for _, step, _ in found))
