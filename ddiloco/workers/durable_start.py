"""What a syncer begins with: durable rounds of an earlier process, or initial parameters."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ddiloco.config import ConfigError
from ddiloco.outer.fragments import zeros
from ddiloco.outer.global_model import GlobalModel
from ddiloco.protocol.state import SyncerState
from ddiloco.storage.durable import DurableState
from ddiloco.telemetry import records
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.positions import dealt_or_told


def durable_start(
    assembly: Assembly,
    durable: DurableState,
    resumed: bool,
    record: Callable[[Any], None],
) -> tuple[GlobalModel, SyncerState | None]:
    """The global model with all fragments, and the state to begin from; None: the run begins.

    What the run begins with is durable then. `resumed`: a run has begun in the folder, and goes on.

    Raises:
      ConfigError: the disk refuses.
      DurableStateError: the run cannot continue from what an earlier syncer left.
    """
    try:
        durable.folder.mkdir(parents=True, exist_ok=True)
        durable.sweep(range(assembly.layout.num_fragments))
        durable.sweep()
        if not resumed:
            model = assembly.global_model(assembly.initial_parameters())
            durable.begin(model)
            durable.complete()
            return model, None
        model = assembly.global_model(zeros(assembly.layout))
        state = durable.restore(model)
    except OSError as error:
        workdir = durable.folder.parent
        raise ConfigError(f"workdir: {workdir}: cannot be written to: {records.reason(error)}") from None
    state = dealt_or_told(state, assembly.experiment, record)
    record(records.Resumed(state.versions, time.time()))
    return model, state
