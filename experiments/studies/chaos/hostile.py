"""Hostile peers in a learner's place: takes the arguments of experiments.learner, and plays that learner.

A `Liar` has its credentials and an `UnauthorizedClient` has none. What they did and how it ended is in
hostile.json beside the workdir. Ends as a learner would, once the syncer says that the run is over.
"""

from __future__ import annotations

import collections
import json
import pathlib
import threading

from absl import flags

from experiments.cli import exit_handling, program, roles
from experiments.studies.chaos.processes import DEEDS

_CONFIG = program.define_config("configs/chaos_processes.py")
_SYNCER = flags.DEFINE_string("syncer", "127.0.0.1:7070", "HOST:PORT of the syncer.")
_LEARNER_ID = flags.DEFINE_integer("learner_id", None, "Whose place it has.", lower_bound=0)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
roles.define_security()

_EVERY = 1.0  # seconds between two copies of the counts


def main(_) -> int:
    from ddiloco.remote.wire.compatibility import terms_of
    from ddiloco.run.recipes import assembly_of
    from ddiloco.storage import array_file
    from experiments.studies.chaos.liar import Liar
    from experiments.studies.chaos.unauthorized_client import UnauthorizedClient

    experiment, learner = _CONFIG.experiment(driver="remote"), _LEARNER_ID.value
    roles.name_process("hostile")
    stop, received = exit_handling.stop_on_signals()
    counts: collections.Counter[str] = collections.Counter()
    terms = terms_of(experiment, assembly_of(experiment).layout)
    security = roles.security().of(learner)
    count = lambda deed: counts.update([deed])  # noqa: E731
    tokens = experiment.batch_size(learner) * experiment.data.sequence_length
    liar = Liar(_SYNCER.value, terms, learner, security, experiment.train.steps, tokens, count)
    peers = [liar.run, UnauthorizedClient(_SYNCER.value, count).run]
    for peer in peers:
        threading.Thread(target=peer, args=(stop,), daemon=True).start()
    path = pathlib.Path(_WORKDIR.value).parent / DEEDS
    while not (stop.wait(_EVERY) or liar.over):
        array_file.replace(path, [json.dumps(dict(sorted(counts.copy().items())), indent=1).encode()])
    return 128 + received[0] if received else 0


if __name__ == "__main__":
    program.run(main)
