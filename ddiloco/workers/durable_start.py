"""The initial state of a syncer: durable rounds of an earlier process, or initial parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ddiloco.config import ConfigError
from ddiloco.outer.fragments import zeros
from ddiloco.outer.global_model import GlobalModel
from ddiloco.protocol.state import SyncerState
from ddiloco.storage.durable import DurableState
from ddiloco.telemetry import records
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.positions import reshard_or_reset


def durable_start(
    assembly: Assembly,
    durable: DurableState,
    resumed: bool,
    record: Callable[[Any], None],
    fragments: Sequence[int] | None = None,
    ready: Callable[[], None] = lambda: None,
) -> tuple[GlobalModel, SyncerState | None]:
    """The global model with these fragments, None: all; and the durable state, None: a new run.

    The initial state of all fragments is durable then. `resumed`: the folder has a run to continue. `ready`
    is called before a new run is complete.

    Raises:
      ConfigError: the disk refuses.
      DurableStateError: the run cannot continue from what an earlier syncer left.
    """
    try:
        durable.folder.mkdir(parents=True, exist_ok=True)
        every = range(assembly.layout.num_fragments)
        own = every if fragments is None else fragments
        durable.sweep(own if resumed else every)
        durable.sweep()
        if not resumed:
            initial = assembly.initial_parameters()
            model = assembly.global_model(initial, own)
            for part in (model, *(assembly.global_model(initial, [p]) for p in every if p not in own)):
                durable.begin(part)
            ready()
            durable.complete()
            return model, None
        model = assembly.global_model(zeros(assembly.layout), own)
        state = durable.restore(model)
    except OSError as error:
        workdir = durable.folder.parent
        raise ConfigError(f"workdir: {workdir}: cannot be written to: {records.reason(error)}") from None
    state = reshard_or_reset(state, assembly.experiment, record)
    if 0 in own:  # the first shard, which writes the run's records
        versions = state.versions if len(own) == len(every) else durable.state().versions
        record(records.Resumed(versions, time.time()))
    return model, state
