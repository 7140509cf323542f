"""The evaluator of a run of processes: `python -m experiments.evaluator --config=FILE --workdir=DIR`.

It needs the syncer's workdir, the same settings, and devices that no learner uses; without it, the syncer
scores the global model itself, once, at the end.
"""

from __future__ import annotations

import pathlib

from absl import flags

from experiments.cli import exit_handling, program, roles

_CONFIG = program.define_config("configs/dense.py")
_WORKDIR = roles.define(
    flags.DEFINE_string, "workdir", None, "Folder of the run, which its syncer was given."
)
roles.define_role()


def main(_) -> int:
    from ddiloco.remote.wire.security import Security
    from experiments.cli.role_main import role_main

    workdir = pathlib.Path(program.required(_WORKDIR))
    experiment = _CONFIG.experiment(driver="remote")
    assignment = roles.assignment("evaluator", workdir=workdir)
    stop, received = exit_handling.stop_on_signals(assignment.grace)
    return role_main(assignment, experiment, Security(), stop, received)


if __name__ == "__main__":
    program.run(main, refused=roles.refused)
