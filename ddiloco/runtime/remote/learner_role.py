"""A learner as a process: a LearnerWorker whose syncer is at the other end of the wire."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ddiloco.config import ConfigError
from ddiloco.outer.encoding import encoded_bytes
from ddiloco.protocol.learner import LearnerCore
from ddiloco.runtime.assembly import Assembly, make_layout
from ddiloco.runtime.delivery import Leave
from ddiloco.runtime.experiment import Experiment
from ddiloco.runtime.learner import LearnerWorker
from ddiloco.runtime.rehearsal import with_steps
from ddiloco.runtime.remote.client import SyncerClient
from ddiloco.runtime.remote.security import Security
from ddiloco.runtime.remote.terms import terms_of

_TOLD_SECONDS = 30.0  # for the last records to be heard, when the syncer is there
_ABANDONED_SECONDS = 2.0  # the same after the word to stop, when it may not be


def run_learner(
    experiment: Experiment,
    learner: int,
    address: str,
    security: Security,
    stop: threading.Event,
    note: Callable[[str], None],
) -> str | None:
    """Trains until the run is over or `stop` is set; steps on while the syncer cannot be reached.

    Args:
      experiment: that of the syncer, in all that both decide by.
      learner: its number, from 0; the number of its data shard too.
      address: the syncer's, HOST:PORT.
      security: what the syncer asks for.
      stop: ends it early.
      note: takes a line on what happens to the connection.

    Returns:
      Why the learner failed; None if it did not.

    Raises:
      ConfigError, DataError: what is asked for cannot be, or the syncer refuses the learner.
    """
    experiment = with_steps(
        experiment,
        lambda: make_layout(experiment).bytes,
        lambda: encoded_bytes(make_layout(experiment), experiment.outer.codec),
    )
    if learner >= experiment.sync.num_learners:
        raise ConfigError(
            f"learner_id: is {learner}, but must be below config.sync.num_learners, "
            f"{experiment.sync.num_learners}"
        )
    # A number above all that earlier processes of the learner came to: each took one more at a return, and
    # none returned more than once a microsecond.
    process = time.time_ns() // 1000
    assembly = Assembly(experiment)
    assembly.check_learner(learner)
    terms = terms_of(experiment, assembly.layout)
    client = SyncerClient(address, learner, process, terms, security, experiment.remote, note)
    client.start()
    equipment = assembly.own_equipment(learner)
    while not client.accepted.wait(0.2):
        if stop.is_set():
            return None
    if client.refusal is None:
        incarnation = max(process, client.newest_incarnation + 1)
        core = LearnerCore(learner, incarnation, experiment.sync, experiment.train.steps)
        worker = LearnerWorker(core, equipment, client.outbox.send, client.outbox.record)
        client.attach(worker)
        worker.start()
        _wait(worker, stop)
        client.finish(_ABANDONED_SECONDS if stop.is_set() else _TOLD_SECONDS)
    if client.refusal is not None:
        raise ConfigError(f"syncer: {address} refused learner {learner}: {client.refusal}")
    return worker.failure


def _wait(worker: LearnerWorker, stop: threading.Event) -> None:
    told = False
    while not worker.join(0.2):
        if stop.is_set() and not told:
            told = True
            worker.inbox.put(Leave())
