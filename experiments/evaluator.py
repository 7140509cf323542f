"""The evaluator of a run of processes: `python -m experiments.evaluator --config=FILE --workdir=DIR`.

It needs the syncer's workdir, the same settings, and devices that no learner uses; without it, the syncer
scores the global model itself, once, at the end.
"""

from __future__ import annotations

import pathlib

from absl import flags

from experiments.front import cli, ending, roles

_CONFIG = cli.define_config("configs/dense.py")
_WORKDIR = roles.define(
    flags.DEFINE_string, "workdir", None, "Folder of the run, which its syncer was given."
)
roles.define_role()


def main(_) -> int:
    from ddiloco.remote.wire.security import Security
    from ddiloco.settings.experiment import parse
    from experiments.front.role_main import role_main

    if not _WORKDIR.value:
        raise cli.UsageError("workdir: is missing; give --workdir=DIR, the syncer's")
    config = _CONFIG.value
    config.driver = "remote"
    experiment = parse(config)
    assignment = roles.assignment("evaluator", workdir=pathlib.Path(_WORKDIR.value))
    stop, received = ending.stop_on_signals(assignment.grace)
    return role_main(assignment, experiment, Security(), stop, received)


if __name__ == "__main__":
    cli.run(main)
